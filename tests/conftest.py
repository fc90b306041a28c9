"""Fixtures for every test: fixed seeds, NaN-filled memory, tiny random models, no network."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# Set before transformers is imported anywhere: no test may reach a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Every head is 16 wide: hidden 64 over 4 query heads, and 2 KV heads where the family has groups.
_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
_COMMON = {
    # Small weights make greedy text repeat one token, and then every draft would be accepted.
    "initializer_range": 0.35,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "head_dim": 16},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 16},
    "mistral": {**_GROUPED, "head_dim": 16, "sliding_window": 16},
    # Four layers, so that windowed and full ones alternate. Only eager attention applies soft caps
    # in every supported version of transformers.
    "gemma2": {
        **_GROUPED,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
        # With random weights, tied embeddings make each token predict itself.
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    },
    "phi3": _GROUPED,
    "gpt2": {
        "vocab_size": 97,
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    },
    # Parallel residuals weigh the embedding less, so that it takes larger weights for varied text.
    "gpt_neox": {**_SHAPE, "initializer_range": 0.7},
    "mixtral": {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_GROUPED,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
TINY_FAMILIES = tuple(_FAMILIES)


def pytest_configure(config: pytest.Config) -> None:
    """Give each xdist worker one torch thread: two workers share two cores."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs Triton kernels; skip what needs a GPU where there is none."""
    for item in items:
        cell = getattr(item, "callspec", None)
        named = [] if cell is None else [v for v in cell.params.values() if isinstance(v, str)]
        if "triton" in named or "triton_device" in getattr(item, "fixturenames", ()):
            item.add_marker("triton")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


def pytest_collection_finish() -> None:
    """Leave what imports have made out of garbage collections, which take half a second with it."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `family` once for every tiny family, unless it names its own."""
    own = any(
        "family" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")
    )
    if "family" in metafunc.fixturenames and not own:
        metafunc.parametrize("family", TINY_FAMILIES)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same noise, in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_filled_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill uninitialised memory with NaN (floats) or the largest value (integers).

    A kernel or a cache that reads what nobody wrote then fails at once, not once in a thousand
    runs. PyTorch does so for every allocation of `torch.empty` and its kin while deterministic
    algorithms are on, which is more than a patched `torch.empty` could see. They are on as warnings
    only, so that no operation is refused. `@pytest.mark.raw_memory` opts out.
    """
    if request.node.get_closest_marker("raw_memory"):
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
    torch.utils.deterministic.fill_uninitialized_memory = was_filling


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """Return `build(family, *, seed=0, **overrides)`: a random fp32 causal LM in eval mode.

    `overrides` are fields of the family's config, or `attn_implementation`. The same arguments give
    the same weights, each call gives a model of its own, and torch's global generator is left as it
    was.
    """
    return _build_tiny_model


def _build_tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**_COMMON, **_FAMILIES[family], **overrides}
    attention = fields.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    return model.eval()


@pytest.fixture
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device that Triton kernels run on; skip where they cannot run.

    The interpreter (`TRITON_INTERPRET=1`) must be on before Triton is first imported, so that a
    fixture cannot turn it on. `make test` runs tests that are marked `triton` once more, with it.
    """
    assert request.node.get_closest_marker("triton"), "nobody would run this test interpreted"
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.interpreter import repair_interpreter

        repair_interpreter()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU, and TRITON_INTERPRET is not 1")
    return torch.device("cuda")


@pytest.fixture
def interpreted(triton_device: torch.device) -> None:
    """Skip a test that is for interpreted kernels alone."""
    if triton_device.type != "cpu":
        pytest.skip("TRITON_INTERPRET is not 1")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the forwards that are compiled; they are traced, and run as PyTorch runs them."""
    from pillarattn.patch import compiled_parts

    compiled, compile_it = [], torch.compile

    def with_own_kernels(forward: Any, *, dynamic: bool) -> Any:
        compiled.append(forward)
        return compile_it(forward, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(compiled_parts.torch, "compile", with_own_kernels)
    yield compiled
    torch.compiler.reset()


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replay passes without a GPU: over the memory of a recording, by its own Python code.

    Everything but the graph itself is then what runs on a GPU: fixed shapes, lengths that only
    tensors know, selections in wider memory. Returns the `CapturedPasses` made, one a generation.
    """
    from pillarattn.patch import build_target, kept_passes
    from pillarattn.patch.captured_passes import CapturedPasses

    made: list[Any] = []

    class Rehearsal(CapturedPasses):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

        def _record(self, recording: Any) -> Callable[[], None]:
            return lambda: self._play(recording)

    monkeypatch.setattr(build_target, "CapturedPasses", Rehearsal)
    for module in (build_target, kept_passes):
        monkeypatch.setattr(module, "obstacle", lambda model, cache: None)
    return made
