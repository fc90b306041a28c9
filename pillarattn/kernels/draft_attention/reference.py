"""Draft attention in plain PyTorch: gather the rows that are read, then attend to all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pillarattn.kernels.softmax import accumulation_dtype, attention_probabilities, log_sum_exp


def draft_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    indices: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute `kernels.draft_attention`; the copies it makes hold N + tail rows, never S."""
    dtype = accumulation_dtype(query.dtype)
    positions, visible = _positions_read(
        indices, counts, tail_start=tail_start, lengths=lengths, window=window
    )
    near_keys = gather_rows(keys, positions).to(dtype)
    near_values = gather_rows(values, positions).to(dtype)
    if visible is not None:
        # Padding may have gathered an undefined row, and 0 * NaN is NaN.
        near_values = near_values.masked_fill_(~visible.unsqueeze(-1), 0.0)
        visible = visible.unsqueeze(2)
    return attend(
        query,
        near_keys,
        near_values,
        visible=visible,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        lse=lse,
    )


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend from one row per sequence to gathered keys, all of them where `visible` is None.

    Shapes: query `[B, Hq, 1, D]`; keys `[B, Hkv, M, D]` and values in the accumulation dtype, and
    finite where hidden; visible `[B, Hkv, 1, M]` bool. Else as in `kernels.draft_attention`.
    """
    batch, query_heads, _, dim = query.shape
    rows = (query.to(keys.dtype) * scale).reshape(batch, keys.shape[1], -1, dim)
    logits = (rows @ keys.transpose(-1, -2)).unsqueeze(-2)
    visible = None if visible is None else visible.unsqueeze(2)
    if lse is not None:
        lse.copy_(log_sum_exp(logits, visible=visible, softcap=softcap, sinks=sinks).flatten(1, 2))
    probabilities = attention_probabilities(logits, visible=visible, softcap=softcap, sinks=sinks)
    out = probabilities.squeeze(-2) @ values
    return out.reshape(batch, query_heads, 1, values.shape[3]).to(query.dtype)


def _positions_read(
    indices: Tensor, counts: Tensor, *, tail_start: Tensor, lengths: Tensor, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return positions `[B, Hkv, N + T]` int64 and which of them count (None: all of them)."""
    batch, kv_heads, width = indices.shape
    tails = lengths - tail_start
    longest = max(int(tails.max()), 0) if batch else 0
    steps = torch.arange(longest, device=lengths.device)
    tail = (tail_start.long().unsqueeze(-1) + steps).unsqueeze(1).expand(-1, kv_heads, -1)
    positions = torch.cat([indices.long(), tail], dim=-1)
    # One count for all heads and rows is the usual case, and needs no mask.
    full = not positions.numel() or (int(counts.min()) >= width and int(tails.min()) >= longest)
    if full and window is None:
        return positions, None
    selected = torch.arange(width, device=lengths.device) < counts.unsqueeze(-1)
    in_tail = (steps < tails.unsqueeze(-1)).unsqueeze(1).expand(-1, kv_heads, -1)
    visible = torch.cat([selected, in_tail], dim=-1)
    positions = positions.masked_fill(~visible, 0)
    if window is not None:
        visible = visible & (positions > (lengths - 1 - window).view(-1, 1, 1))
    return positions, visible


def gather_rows(cache: Tensor, positions: Tensor) -> Tensor:
    """Return `cache[b, h, positions[b, h]]`, shape `[B, Hkv, M, D]`, from a view with any strides.

    One `index_select` over the storage seen as rows: three times faster on a CPU than indexing with
    three index tensors (README), and unlike `reshape` it never copies the cache.

    Raises:
        ValueError: on the CPU, a position is outside the cache.
    """
    batch, kv_heads, size, dim = cache.shape
    # The flat gather below would read another head's row instead of failing.
    if not positions.is_cuda and positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= size:
            raise ValueError(
                f"positions to read must be in 0..{size - 1}, got {low}..{high}; "
                "check indices, counts and tail_start"
            )
    strides = [
        stride if extent > 1 else 0
        for extent, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True)
    ]
    unit = math.gcd(*strides) or 1
    per_batch, per_head, per_position = (stride // unit for stride in strides)
    last = (batch - 1) * per_batch + (kv_heads - 1) * per_head + (size - 1) * per_position
    rows = cache.as_strided((last + 1 if cache.numel() else 0, dim), (unit, cache.stride(-1)))
    batches = torch.arange(batch, device=cache.device).view(-1, 1, 1) * per_batch
    heads = torch.arange(kv_heads, device=cache.device).view(-1, 1) * per_head
    index = positions * per_position + (batches + heads)
    return rows.index_select(0, index.view(-1)).view(batch, kv_heads, -1, dim)
