"""Mixed attention in plain PyTorch: one request and one KV head after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.kernels.mixed_attention.known import KnownScores
from pillarattn.kernels.mixed_attention.work_list import WorkList
from pillarattn.kernels.softmax import accumulation_dtype, attention_probabilities, log_sum_exp

# A normaliser that is far off gives no share beyond this: fp16 holds it.
LARGEST_SHARE = 2.0**15


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
    known: KnownScores | None = None,
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
            kept = 0 if known is None else int(known.kept_place[b])
            if lse is not None or kept > 0:
                found = log_sum_exp(logits, visible=visible, **given)[0, 0].transpose(0, 1)
                if lse is not None:
                    lse[rows, heads] = found.to(lse.dtype)
                if known is not None and kept > 0:
                    known.kept_lse[b, kept - 1, heads] = found[0].to(known.kept_lse.dtype)
            if known is not None and int(known.score_place[b]) > 0:
                _score(known, b, heads, h, logits[0, 0], visible, softcap)
    return out


def _score(
    known: KnownScores, b: int, heads: slice, h: int, logits: Tensor, visible: Tensor,
    softcap: float | None,
) -> None:  # fmt: skip
    """Score the rows of a request by one KV head, each or their mean."""
    first = 0 if known.first_place is None else int(known.first_place)
    shares = _shares(logits, visible, known.kept_lse[b, :, heads], softcap)
    if known.pooled_rows is not None:
        shares = shares.mean(dim=0, keepdim=True)
    goal = known.scores[first + int(known.score_place[b]) - 1, h]
    goal[: shares.shape[0], : shares.shape[1]] = shares.to(goal.dtype)


def _positions(chosen: Tensor, count: int, tail: int, length: int) -> Tensor:
    """Return the logical positions that a KV head reads, int64."""
    if count < 0:
        return torch.arange(length, device=chosen.device)
    rest = torch.arange(tail, max(length, tail), device=chosen.device)
    return torch.cat([chosen[:count].long(), rest])


def _shares(logits: Tensor, visible: Tensor, kept: Tensor, softcap: float | None) -> Tensor:
    """Return what rows pay to keys by kept normalisers `[W, G]`, averaged over the group.

    Shapes: logits `[G, rows, keys]`, visible and the result `[rows, keys]`.
    """
    rows = logits.shape[1]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    line = torch.arange(rows, device=kept.device).clamp_max(max(rows - 2, 0))
    known = kept[line].T.unsqueeze(-1).to(logits.dtype)
    shares = (logits - known).exp().clamp_max(LARGEST_SHARE)
    return shares.masked_fill(~(visible & known.isfinite()), 0.0).mean(dim=0)
