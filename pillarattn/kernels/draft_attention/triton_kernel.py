"""Draft attention in Triton: each program gathers one stretch of one KV head's reading list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import padded, power_of_two
from pillarattn.kernels.combine_splits.triton_kernel import combine_splits
from pillarattn.kernels.draft_attention.tiles import DraftTiles, chunk_of, default_tiles

LOG2E = 1.4426950408889634


@triton.jit
def _draft_kernel(
    query,
    keys,
    values,
    indices,
    counts,
    tail_start,
    lengths,
    sinks,
    out,
    part,
    lse,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ib,
    stride_ih,
    stride_cb,
    stride_ch,
    stride_ob,
    stride_oh,
    kv_heads,
    scale_log2,
    softcap,
    window,
    chunk,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
    DIRECT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = (row // kv_heads).to(tl.int64)
    h = (row % kv_heads).to(tl.int64)
    count = tl.load(counts + b * stride_cb + h * stride_ch).to(tl.int32)
    tail = tl.load(tail_start + b).to(tl.int32)
    length = tl.load(lengths + b).to(tl.int32)
    # The reading list: `count` selected positions, then every one from `tail` on.
    total = count + tl.maximum(length - tail, 0)
    first = split * chunk
    last = tl.where(split == splits - 1, total, tl.minimum(first + chunk, total))

    heads = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_DV)
    q = tl.load(
        query + b * stride_qb + (h * G + heads)[:, None] * stride_qh + columns[None, :],
        mask=(heads < G)[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    keys += b * stride_kb + h * stride_kh
    values += b * stride_vb + h * stride_vh
    indices += b * stride_ib + h * stride_ih
    best = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total_weight = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    steps = tl.arange(0, BLOCK_N)
    listed = tl.minimum(count, last)
    # Indices are loaded one step ahead: keys that wait for their own indices cannot be queued.
    index = tl.load(indices + first + steps, mask=first + steps < listed, other=0)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        place = start + steps
        position = tl.where(place < count, index, tail + place - count)
        visible = place < last
        ahead = place + BLOCK_N
        index = tl.load(indices + ahead, mask=ahead < listed, other=0)
        if HAS_WINDOW:
            visible = visible & (position > length - 1 - window)
        offset = position.to(tl.int64)
        if BLOCK_D == D:
            k = tl.load(
                keys + offset[:, None] * stride_ks + columns[None, :],
                mask=visible[:, None],
                other=0.0,
            )
        else:
            k = tl.load(
                keys + offset[:, None] * stride_ks + columns[None, :],
                mask=visible[:, None] & (columns < D)[None, :],
                other=0.0,
            )
        if BLOCK_DV == DV:
            v = tl.load(
                values + offset[:, None] * stride_vs + value_columns[None, :],
                mask=visible[:, None],
                other=0.0,
            )
        else:
            v = tl.load(
                values + offset[:, None] * stride_vs + value_columns[None, :],
                mask=visible[:, None] & (value_columns < DV)[None, :],
                other=0.0,
            )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)); the factors carry the base 2 of the exponential.
            raised = tl.exp2(logits * (scale_log2 * 2.0 / softcap))
            logits = softcap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + raised))
        else:
            logits = logits * scale_log2
        logits = tl.where(visible[None, :], logits, -float("inf"))
        peak = tl.maximum(best, tl.max(logits, 1))
        # A step may see nothing (a window): -inf - -inf is NaN.
        base = tl.where(peak > -float("inf"), peak, 0.0)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(best - base)
        total_weight = total_weight * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = peak

    seen = total_weight > 0.0
    real = heads < G
    head = h * G + heads
    if DIRECT:
        base = tl.where(seen, best, 0.0)
        if HAS_SINKS:
            extra = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            extra = extra * 1.4426950408889634
            base = tl.where(seen, tl.maximum(best, extra), 0.0)
            shrink = tl.exp2(best - base)
            total_weight = total_weight * shrink + tl.where(seen, tl.exp2(extra - base), 0.0)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(seen, total_weight, 1.0)[:, None]
        tl.store(
            out + b * stride_ob + head[:, None] * stride_oh + value_columns[None, :],
            acc.to(out.dtype.element_ty),
            mask=real[:, None] & (value_columns < DV)[None, :],
        )
        if HAS_LSE:
            end = (base + tl.log2(tl.where(seen, total_weight, 1.0))) * 0.6931471805599453
            tl.store(lse + row * G + heads, tl.where(seen, end, -float("inf")), mask=real)
    else:
        rows = tl.num_programs(0) * G
        place = split.to(tl.int64) * rows + row * G + heads
        end = tl.where(seen, best + tl.log2(tl.where(seen, total_weight, 1.0)), -float("inf"))
        tl.store(lse + place, end, mask=real)
        acc = acc / tl.where(seen, total_weight, 1.0)[:, None]
        tl.store(
            part + place[:, None] * DV + value_columns[None, :],
            acc,
            mask=(real & seen)[:, None] & (value_columns < DV)[None, :],
        )


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
    tiles: DraftTiles | None = None,
) -> Tensor:
    """Compute `kernels.draft_attention`; `lse` `[B, Hq, 1]` fp32 is written where it is given."""
    batch, query_heads, _, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[3]
    out = torch.empty(batch, query_heads, 1, value_dim, dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    rows, width = batch * kv_heads, indices.shape[2]
    chunk = (tiles.chunk if tiles else None) or chunk_of(rows, width)
    splits = max(1, -(-width // chunk))
    tiles = tiles or default_tiles(query, keys, values, programs=rows * splits)
    part = part_lse = None
    if splits > 1:
        shape = (splits, batch * query_heads)
        part = torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    if indices.stride(2) != 1 and width > 1:
        indices = indices.contiguous()
    with torch.cuda.device_of(query):
        _draft_kernel[(rows, splits)](
            query,
            keys,
            values,
            indices,
            counts,
            tail_start.contiguous(),
            lengths.contiguous(),
            sinks,
            out,
            part,
            lse if part_lse is None else part_lse,
            query.stride(0),
            query.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            *indices.stride()[:2],
            *counts.stride(),
            out.stride(0),
            out.stride(1),
            kv_heads,
            scale * LOG2E,
            0.0 if softcap is None else softcap,
            0 if window is None else window,
            chunk,
            splits,
            G=query_heads // kv_heads,
            D=dim,
            DV=value_dim,
            BLOCK_G=max(16, power_of_two(query_heads // kv_heads)),
            BLOCK_N=tiles.block_keys,
            BLOCK_D=padded(dim),
            BLOCK_DV=padded(value_dim),
            STAGES=tiles.stages,
            DIRECT=splits == 1,
            HAS_SINKS=sinks is not None,
            HAS_CAP=softcap is not None,
            HAS_WINDOW=window is not None,
            HAS_LSE=lse is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    if part is not None and part_lse is not None:
        combine_splits(part, part_lse, out, heads=query_heads, queries=1, sinks=sinks, lse=lse)
    return out
