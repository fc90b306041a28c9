"""A small Hugging Face model as the draft model of another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from pillarattn.errors import NotPatchedError, UnsupportedModelError, UnsupportedOptionError
from pillarattn.modules.attention import PillarAttention
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import PreTrainedModel, decode_context
from pillarattn.patch.target import HFTarget


def target_builder(
    input_ids: Tensor,
    *,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    kernels: str,
    stack: ExitStack,
) -> Callable[[PreTrainedModel], HFTarget]:
    """Return a function that makes a draft model read the prompt of a run.

    Args:
        input_ids: `[B, L]`, the prompt.
        generation_config: as `generate` prepared it for the target.
        model_kwargs: likewise.
        kernels: "auto", "reference" or "triton".
        stack: closed after the run; draft models are switched to their twin attention until then.
    """

    def build(model: PreTrainedModel) -> HFTarget:
        record = getattr(model, "pillarattn_record", None)
        name = type(model).__name__
        if record is None:
            raise NotPatchedError(
                f"the assistant, a {name}, is not patched; call pillarattn.patch(assistant) first"
            )
        if record.dense_reason is not None or record.lockstep:
            reason = record.dense_reason or "its rows must stand at the same position"
            raise UnsupportedModelError(f"{name} cannot be an assistant: {reason}")
        if model_kwargs.get("inputs_embeds") is not None:
            raise UnsupportedOptionError(
                "an assistant reads token ids, and this prompt is inputs_embeds; pass input_ids, "
                "or use another drafter"
            )
        kwargs: dict[str, Any] = {"use_cache": True}
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = mask
            kwargs["position_ids"] = (mask.long().cumsum(dim=-1) - 1).clamp_min(0)
        stack.enter_context(record.active())
        stack.enter_context(decode_context(model))
        cache = PillarCache(config=model.config)
        cache.attention = PillarAttention(kernels=kernels)
        return HFTarget(
            model, input_ids, generation_config=generation_config, model_kwargs=kwargs, cache=cache
        )

    return build
