"""Mixed attention in plain PyTorch: one request and one KV head after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.kernels.mixed_attention.work_list import WorkList
from pillarattn.kernels.softmax import accumulation_dtype, attention_probabilities, log_sum_exp


def mixed_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    *,
    row_starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    block_size: int,
    indices: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
    work: WorkList | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute `kernels.mixed_attention`; reads its integers on the host, and no work list."""
    kv_heads, device = key_pool.shape[1], query.device
    group, dtype = query.shape[1] // kv_heads, accumulation_dtype(query.dtype)
    out = query.new_empty(*query.shape[:2], value_pool.shape[2])
    bounds = row_starts.tolist()
    for b, length in enumerate(lengths.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        own = torch.arange(length - (rows.stop - rows.start), length, device=device)
        for h in range(kv_heads):
            places = _positions(indices[b, h], int(counts[b, h]), int(tail_start[b]), length)
            slots = block_table[b].long()[places // block_size] * block_size + places % block_size
            heads = slice(h * group, (h + 1) * group)
            visible = places <= own.unsqueeze(-1)
            if window is not None:
                visible = visible & (places > own.unsqueeze(-1) - window)
            keys, values = (pool[slots, h].to(dtype) for pool in (key_pool, value_pool))
            logits = (query[rows, heads].transpose(0, 1).to(dtype) * scale) @ keys.T
            # [batch, KV heads, group, rows, keys], as the softmax takes it.
            given: dict[str, Any] = {"softcap": softcap}
            given["sinks"] = None if sinks is None else sinks[heads]
            logits = logits[None, None]
            mass = attention_probabilities(logits.clone(), visible=visible, **given)[0, 0]
            out[rows, heads] = (mass @ values).transpose(0, 1).to(out.dtype)
            if lse is not None:
                found = log_sum_exp(logits, visible=visible, **given)[0, 0]
                lse[rows, heads] = found.transpose(0, 1).to(lse.dtype)
    return out


def _positions(chosen: Tensor, count: int, tail: int, length: int) -> Tensor:
    """Return the logical positions that a KV head reads, int64."""
    if count < 0:
        return torch.arange(length, device=chosen.device)
    rest = torch.arange(tail, max(length, tail), device=chosen.device)
    return torch.cat([chosen[:count].long(), rest])
