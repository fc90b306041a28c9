"""Mixed attention in plain PyTorch: one request after the other."""

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
    kv_heads, dtype = key_pool.shape[1], accumulation_dtype(query.dtype)
    out = query.new_empty(*query.shape[:2], value_pool.shape[2])
    bounds, line = row_starts.tolist(), torch.arange(kv_heads, device=query.device).unsqueeze(-1)
    given: dict[str, Any] = {"softcap": softcap, "sinks": sinks}
    for b, length in enumerate(lengths.tolist()):
        rows = slice(bounds[b], bounds[b + 1])
        if rows.start == rows.stop:
            continue
        own = torch.arange(length - (rows.stop - rows.start), length, device=query.device)
        places, is_read = _positions(indices[b], counts[b], int(tail_start[b]), length)
        visible = _visible(places, is_read, own, window)
        slots = block_table[b].long()[places // block_size] * block_size + places % block_size
        keys, values = (pool[slots, line].to(dtype) for pool in (key_pool, value_pool))
        # Nothing times an undefined value is undefined.
        values = values.masked_fill(~is_read.unsqueeze(-1), 0.0)
        # [KV heads, group, rows, D], and with a batch of one as the softmax takes it.
        by_head = query[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).to(dtype) * scale
        logits = (by_head @ keys.unsqueeze(1).transpose(2, 3)).unsqueeze(0)
        mass = attention_probabilities(logits.clone(), visible=visible, **given)[0]
        out[rows] = (mass @ values.unsqueeze(1)).flatten(0, 1).transpose(0, 1).to(out.dtype)
        kept = 0 if known is None else int(known.kept_place[b])
        if lse is not None or kept > 0:
            found = log_sum_exp(logits, visible=visible, **given)[0].flatten(0, 1).T
            if lse is not None:
                lse[rows] = found.to(lse.dtype)
            if known is not None and kept > 0:
                known.kept_lse[b, kept - 1] = found[0].to(known.kept_lse.dtype)
        if known is not None and int(known.score_place[b]) > 0:
            _score(known, b, logits[0], visible, softcap)
    return out


def _positions(chosen: Tensor, counts: Tensor, tail: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the logical positions `[Hkv, n]` that KV heads read, and which of them count.

    Heads of a draft may read unlike numbers: the widest one's is n, and others are filled up with
    position 0, which does not count.
    """
    device = chosen.device
    if int(counts.max()) < 0:
        places = torch.arange(length, device=device).expand(len(counts), -1)
        return places, torch.ones_like(places, dtype=torch.bool)
    width = int(counts.max())
    is_chosen = torch.arange(width, device=device) < counts.unsqueeze(-1)
    picked = chosen[:, :width].long().masked_fill(~is_chosen, 0)
    rest = torch.arange(tail, max(length, tail), device=device).expand(len(counts), -1)
    is_read = torch.cat([is_chosen, torch.ones_like(rest, dtype=torch.bool)], dim=-1)
    return torch.cat([picked, rest], dim=-1), is_read


def _visible(places: Tensor, is_read: Tensor, own: Tensor, window: int | None) -> Tensor:
    """Return which positions each row sees: `[Hkv, 1, rows, n]`, the same for a group's heads."""
    places, own = places.unsqueeze(1), own.unsqueeze(-1)
    visible = is_read.unsqueeze(1) & (places <= own)
    if window is not None:
        visible = visible & (places > own - window)
    return visible.unsqueeze(1)


def _score(
    known: KnownScores, b: int, logits: Tensor, visible: Tensor, softcap: float | None
) -> None:
    """Score the rows of a request, each or their mean."""
    first = 0 if known.first_place is None else int(known.first_place)
    shares = _shares(logits, visible, known.kept_lse[b], softcap)
    if known.pooled_rows is not None:
        shares = shares.mean(dim=1, keepdim=True)
    goal = known.scores[first + int(known.score_place[b]) - 1]
    goal[:, : shares.shape[1], : shares.shape[2]] = shares.to(goal.dtype)


def _shares(logits: Tensor, visible: Tensor, kept: Tensor, softcap: float | None) -> Tensor:
    """Return what rows pay to keys by kept normalisers `[W, Hq]`, averaged over the group.

    Shapes: logits `[Hkv, G, rows, keys]`, visible `[Hkv, 1, rows, keys]`, and the result
    `[Hkv, rows, keys]`.
    """
    rows = logits.shape[2]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    line = torch.arange(rows, device=kept.device).clamp_max(max(rows - 2, 0))
    known = kept[line].T.unflatten(0, logits.shape[:2]).unsqueeze(-1).to(logits.dtype)
    shares = (logits - known).exp().clamp_max(LARGEST_SHARE)
    return shares.masked_fill(~(visible & known.isfinite()), 0.0).mean(dim=1)
