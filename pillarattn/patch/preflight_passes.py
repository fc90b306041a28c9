"""The passes of the preflight: the same random tokens in single steps, in blocks and as drafts."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase, RowLengths
from pillarattn.errors import UnsupportedModelError
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.step import StepState
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import DynamicCache, PreTrainedModel, cache_keyword
from pillarattn.patch.foreign_target import ForeignTarget
from pillarattn.patch.target import HFTarget

if TYPE_CHECKING:
    from pillarattn.patch.record import PatchRecord

# Tokens of a block: the last ones of the random text.
BLOCK = 4


def plain_steps(model: PreTrainedModel, ids: Tensor, *, padding: int = 0) -> Tensor:
    """Return the block's logits as plain `generate` computes them, `[2, BLOCK, V]`."""
    kwargs = prompt_kwargs(model, ids, padding=padding)
    text = ids[:, :-BLOCK]
    outputs = model._prefill(text, model.generation_config, dict(kwargs))
    logits = []
    for i in range(-BLOCK, 0):
        text = torch.cat([text, ids[:, i : i + 1] if i < -1 else ids[:, -1:]], dim=1)
        kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
        inputs = model.prepare_inputs_for_generation(
            text, next_sequence_length=1, is_first_iteration=False, **kwargs
        )
        outputs = model(**inputs, return_dict=True)
        logits.append(outputs.logits[:, -1].float())
    return torch.stack(logits, dim=1)


def _check_windows(model: PreTrainedModel, cache: PillarCache) -> None:
    """Refuse a model whose own cache forgets what its attention could still see, or the reverse.

    A model that loops over its layers may use more of them than its config names.
    """
    own = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    for index, layer in enumerate(cache.layers):
        if index >= len(own) or layer.lengths is None:
            continue
        kept = getattr(own[index], "sliding_window", None)
        if kept != layer.window:
            raise UnsupportedModelError(
                f"{type(model).__name__}: layer {index} attends within {layer.window} tokens but "
                f"its cache keeps {kept}; correct sliding_window in the config, or use the model "
                "without assistant="
            )


def prompt_kwargs(model: PreTrainedModel, ids: Tensor, *, padding: int = 0) -> dict[str, Any]:
    """Return what `generate` would hand over, the first row starting with `padding` pads."""
    kwargs: dict[str, Any] = {"use_cache": True}
    length = ids.shape[1] - BLOCK
    mask = torch.ones(2, length, dtype=torch.int64, device=ids.device)
    mask[0, :padding] = 0
    if padding:
        kwargs["attention_mask"] = mask
    if model._supports_default_dynamic_cache():
        kwargs[cache_keyword()] = DynamicCache(config=model.config.get_text_config(decoder=True))
    if "position_ids" in inspect.signature(model.forward).parameters:
        kwargs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp_min(0)
    return kwargs


def sparse_blocks(model: PreTrainedModel, record: PatchRecord, ids: Tensor) -> dict[str, Tensor]:
    """Return the block's logits from a verify pass, drafts, a repeat and ragged rows."""
    target = _sparse_target(model, record, ids, prompt_kwargs(model, ids))
    cache, prompt = target.cache, ids.shape[1] - BLOCK
    block = ids[:, prompt:]
    with record.active():
        target.prefill(StepState(Phase.PREFILL))
        _check_windows(model, cache)
        used = {i for i, layer in enumerate(cache.layers) if layer.lengths is not None}
        if not used <= set(target.layer_calls or ()):
            raise UnsupportedModelError(
                f"{type(model).__name__}: layers {sorted(used - set(target.layer_calls or ()))} "
                "attend outside transformers' AttentionInterface"
            )
        record.stores_latents = any(not cache.layers[i].holds_attended_keys for i in used)
        results = _rounds(target, block)
        # Row 1 keeps one token more than row 0: positions, masks and writes are per row from here.
        target.keep(RowLengths([prompt, prompt + 1], block.device))
        shifted = torch.stack([block[0, : BLOCK - 1], block[1, 1:]])
        ragged = target.forward(shifted, StepState(Phase.VERIFY))
        target.keep(RowLengths([prompt + 1, prompt + 1], block.device))
        again = target.forward(block[:, 1:], StepState(Phase.VERIFY))
    results["ragged"] = torch.cat([again[:1], ragged[1:]])
    results["ragged"][0, : BLOCK - 2] = ragged[0, 1:]
    return results


def _sparse_target(
    model: PreTrainedModel, record: PatchRecord, ids: Tensor, kwargs: dict[str, Any]
) -> HFTarget:
    cache = PillarCache(config=model.config)
    cache.attention = PillarAttention(kernels=record.kernels)
    return HFTarget(
        model,
        ids[:, :-BLOCK],
        generation_config=model.generation_config,
        model_kwargs=kwargs,
        cache=cache,
    )


def _foreign_target(model: PreTrainedModel, ids: Tensor, kwargs: dict[str, Any]) -> ForeignTarget:
    return ForeignTarget(
        model,
        ids[:, :-BLOCK],
        generation_config=model.generation_config,
        model_kwargs=kwargs,
    )


def padded_sparse_block(
    model: PreTrainedModel, record: PatchRecord, ids: Tensor, kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    target = _sparse_target(model, record, ids, kwargs)
    with record.active():
        target.prefill(StepState(Phase.PREFILL))
        return {"padded": target.forward(ids[:, -BLOCK:], StepState(Phase.VERIFY))}


def padded_foreign_block(
    model: PreTrainedModel, ids: Tensor, kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    target = _foreign_target(model, ids, kwargs)
    target.prefill(StepState(Phase.PREFILL))
    return {"padded": target.forward(ids[:, -BLOCK:], StepState(Phase.VERIFY))}


def foreign_blocks(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Return the block's logits with the model's own attention and cache."""
    prompt = ids.shape[1] - BLOCK
    target = _foreign_target(model, ids, prompt_kwargs(model, ids))
    block = ids[:, prompt:]
    target.prefill(StepState(Phase.PREFILL))
    results = _rounds(target, block)
    target.keep(RowLengths([prompt + 1] * 2, block.device))
    results["continued"] = target.forward(block[:, 1:], StepState(Phase.VERIFY))
    return results


def _rounds(target: HFTarget | ForeignTarget, block: Tensor) -> dict[str, Tensor]:
    """Run the block as a verify pass, as single drafts and as a verify pass again."""
    base = target.cache.lengths
    results = {"verified": target.forward(block, StepState(Phase.VERIFY))}
    target.roll_back(base)
    drafted = [target.forward(block[:, i : i + 1], StepState(Phase.DRAFT)) for i in range(BLOCK)]
    results["drafted"] = torch.cat(drafted, dim=1)
    target.roll_back(base)
    results["repeated"] = target.forward(block, StepState(Phase.VERIFY))
    return results
