"""Draft and verify passes through a model's own attention function, for what the kernels lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pillarattn.datatypes import Phase, Selection
from pillarattn.modules.cache import ContiguousLayer
from pillarattn.modules.step import AttentionOptions, StepState

Attend = Callable[..., tuple[Tensor, Tensor | None]]


def attend(
    original: Attend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layer: ContiguousLayer,
    index: int,
    step: StepState,
    sees: Callable[[Tensor, Tensor], Tensor],
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend by `original` over all keys, or in a draft over the selected ones and the tail.

    Args:
        original: the model's attention function; it gets an additive mask `[B, H, Q, S]`.
        module: the attention module.
        query: `[B, Hq, Q, D]`, the newest Q tokens of each row.
        key: `[B, Hkv, S, D]`; what lies past a row's length is hidden.
        value: `[B, Hkv, S, Dv]`.
        layer: gives the rows' lengths.
        index: the layer's number in the cache.
        step: phase, selections and where scores go.
        sees: whether the token at one position sees the key at another.
        arguments: what else the module passes: a position bias, sinks, a scale.
    """
    assert layer.lengths is not None
    step.visited.append(index)
    lengths, width = layer.lengths.tensor, query.shape[2]
    at = (lengths[:, None] - width + torch.arange(width, device=query.device))[:, None, :, None]
    selection = step.selections.get(index) if step.phase is Phase.DRAFT else None
    if selection is None:
        places = torch.arange(key.shape[2], device=query.device).expand(1, 1, 1, -1)
        mask = _additive((places <= at) & sees(at, places), query.dtype)
        if step.scores is not None and index in step.scored_layers:
            rows = _row_scores(query, key, mask, arguments)
            step.scores.put(index, rows, layer.lengths)
        return original(module, query, key, value, mask, **arguments)
    if step.refresh is not None:
        options = AttentionOptions(scale=arguments.get("scaling"))
        selection = step.refresh(index, query, key, layer.lengths, options)
    places, is_used = _places(selection, lengths)
    gathered = [
        tensor.gather(2, places[..., None].expand(-1, -1, -1, tensor.shape[3]))
        for tensor in (key, value)
    ]
    group = query.shape[1] // key.shape[1]
    places, is_used = (t.repeat_interleave(group, dim=1)[:, :, None] for t in (places, is_used))
    mask = _additive(is_used & sees(at, places), query.dtype)
    bias = arguments.get("position_bias")
    if bias is not None:
        here = places.expand(-1, query.shape[1], -1, -1)
        bias = bias.expand(query.shape[0], query.shape[1], -1, -1).gather(3, here)
        arguments = {**arguments, "position_bias": bias}
    return original(module, query, *gathered, mask, **arguments)


def _places(selection: Selection, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions to read, `[B, Hkv, N + T]`, and which of them are meant."""
    chosen = selection.indices.long()
    line = torch.arange(chosen.shape[2], device=chosen.device)
    tail = int((lengths - selection.tail_start).max())
    after = selection.tail_start[:, None] + torch.arange(tail, device=chosen.device)
    after = after[:, None].expand(-1, chosen.shape[1], -1)
    places = torch.cat([chosen, after], dim=2)
    is_used = torch.cat([line < selection.counts[..., None], after < lengths[:, None, None]], dim=2)
    return places.where(is_used, 0), is_used


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
        ~seen, torch.finfo(dtype).min
    )


def _row_scores(query: Tensor, key: Tensor, mask: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return softmax rows averaged over the heads of a group, `[B, Hkv, Q, S]` fp32."""
    batch, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().view(batch, kv_heads, heads // kv_heads, width, dim)
    scale = arguments.get("scaling") or dim**-0.5
    logits = grouped @ key.float()[:, :, None].transpose(3, 4) * scale
    logits = logits.flatten(1, 2)
    if arguments.get("position_bias") is not None:
        logits = logits + arguments["position_bias"].float()
    logits = logits + mask.float()
    sinks = arguments.get("sinks")
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()], dim=-1)
    probs = logits.softmax(dim=-1)[..., : key.shape[2]]
    return probs.view(batch, kv_heads, -1, width, key.shape[2]).mean(dim=2)
