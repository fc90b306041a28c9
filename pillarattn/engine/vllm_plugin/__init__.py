"""A plugin for vLLM on CPUs: sparse self-drafts of the served model, verified by vLLM itself.

vLLM finds `register` by the entry point group `vllm.general_plugins`. See docs/vllm.md for what has
been run and what has not.
"""

from __future__ import annotations

PROPOSER = "pillarattn.engine.vllm_plugin.proposer.PillarProposer"
BACKEND = "pillarattn.engine.vllm_plugin.backend.PillarCPUBackend"
# The interface that it uses is called experimental, and differs between minor versions.
VERSIONS = ("0.32",)


def register() -> None:
    """Put an attention backend in place of vLLM's own on a CPU; elsewhere do nothing.

    The backend computes what vLLM's computes. It notes queries only once a `PillarProposer` has
    asked it to, so that an engine without speculation stays as it was.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    minor = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
    if minor in VERSIONS and current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
