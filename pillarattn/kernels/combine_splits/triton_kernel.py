"""Weighs the outputs of several splits of one softmax by their log-sum-exps, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two

# Splits per step of the sum. Fixed, so that more splits (all empty) never change an order.
BLOCK_SPLITS = 8


@triton.jit
def _combine_kernel(
    part,
    part_lse,
    sinks,
    out,
    lse,
    stride_ob,
    stride_oh,
    stride_oq,
    rows,
    splits,
    heads,
    queries,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    row = tl.program_id(0)
    steps = tl.arange(0, BLOCK_SPLITS)
    columns = tl.arange(0, BLOCK_DV)
    best = -float("inf")
    for first in range(0, splits, BLOCK_SPLITS):
        inside = first + steps < splits
        one = tl.load(part_lse + (first + steps) * rows + row, mask=inside, other=-float("inf"))
        best = tl.maximum(best, tl.max(one, 0))
    query_row = row % queries
    head = (row // queries) % heads
    batch = (row // queries) // heads
    seen = best > -float("inf")
    peak = tl.where(seen, best, 0.0)
    if HAS_SINKS:
        extra = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        peak = tl.where(seen, tl.maximum(best, extra), 0.0)
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        inside = first + steps < splits
        one = tl.load(part_lse + (first + steps) * rows + row, mask=inside, other=-float("inf"))
        used = one > -float("inf")
        weight = tl.exp2(one - peak)
        total += tl.sum(weight, 0)
        if HAS_OUT:
            place = ((first + steps).to(tl.int64) * rows + row) * DV
            # An empty split writes no output: nothing of it may be read.
            tile = tl.load(
                part + place[:, None] + columns[None, :],
                mask=used[:, None] & (columns < DV)[None, :],
                other=0.0,
            )
            acc += tl.sum(tile * weight[:, None], 0)
    if HAS_SINKS:
        total += tl.where(seen, tl.exp2(extra - peak), 0.0)
    if HAS_OUT:
        acc = acc / tl.where(seen, total, 1.0)
        place = batch.to(tl.int64) * stride_ob + head * stride_oh + query_row * stride_oq
        tl.store(out + place + columns, acc.to(out.dtype.element_ty), mask=columns < DV)
    if HAS_LSE:
        end = (peak + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453
        tl.store(lse + row, tl.where(seen, end, -float("inf")))


@triton.jit(
    do_not_specialize=("all_rows", "kept_width"),
    do_not_specialize_on_alignment=("owners", "splits", "kept_lse", "kept_place"),
)
def combine_listed_kernel(
    part, part_lse, owners, splits, sinks, out, lse, kept_lse, kept_place,
    stride_ot, stride_oh, all_rows, kv_heads, kept_width,
    G: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one row and head by their log-sum-exps, in their order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    owner = tl.load(owners + row)
    known = owner >= 0
    count = tl.load(splits + owner * kv_heads + head // G, mask=known, other=0)
    if count > 1:
        columns = tl.arange(0, BLOCK_DV)
        steps = tl.arange(0, BLOCK_SPLITS)
        place = row * HEADS + head
        stride = all_rows.to(tl.int64) * HEADS
        best = -float("inf")
        for first in range(0, count, BLOCK_SPLITS):
            one = tl.load(
                part_lse + place + (first + steps) * stride,
                mask=first + steps < count,
                other=-float("inf"),
            )
            best = tl.maximum(best, tl.max(one, 0))
        seen = best > -float("inf")
        peak = tl.where(seen, best, 0.0)
        total = peak * 0.0
        if HAS_SINKS:
            extra = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            peak = tl.where(seen, tl.maximum(best, extra), 0.0)
            total = tl.where(seen, tl.exp2(extra - peak), 0.0)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        for first in range(0, count, BLOCK_SPLITS):
            here = place + (first + steps) * stride
            one = tl.load(part_lse + here, mask=first + steps < count, other=-float("inf"))
            share = tl.exp2(one - peak)
            # An empty split writes no output: nothing of it may be read.
            used = (one > -float("inf"))[:, None] & (columns < DV)[None, :]
            found = tl.load(part + here[:, None] * DV + columns[None, :], mask=used, other=0.0)
            acc += tl.sum(found * share[:, None], 0)
            total += tl.sum(share, 0)
        acc = acc / tl.where(seen, total, 1.0)
        tl.store(
            out + row * stride_ot + head * stride_oh + columns,
            acc.to(out.dtype.element_ty),
            mask=columns < DV,
        )
        if HAS_LSE or HAS_KEPT:
            end = (peak + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453
            end = tl.where(seen, end, -float("inf"))
        if HAS_LSE:
            tl.store(lse + place, end)
        if HAS_KEPT:
            kept_at = tl.load(kept_place + owner).to(tl.int32)
            kept = (owner.to(tl.int64) * kept_width + kept_at - 1) * HEADS + head
            tl.store(kept_lse + kept, end, mask=(kept_at > 0) & (kept_at <= kept_width))


def combine_splits(
    part: Tensor | None,
    part_lse: Tensor,
    out: Tensor | None,
    *,
    heads: int,
    queries: int,
    sinks: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Write `out` `[B, Hq, Q, Dv]` from `part` `[P, B * Hq * Q, Dv]` fp32, normalised per split.

    Args:
        part: output of each of P splits; undefined where the split is empty. None with `out`.
        part_lse: `[P, B * Hq * Q]` fp32, base-2 log-sum-exps, -inf where the split is empty.
        out: written, 0 where a row saw nothing. None leaves it out.
        heads: Hq.
        queries: Q.
        sinks: `[Hq]` or None: logits that join the sum and have no value.
        lse: `[B, Hq, Q]` fp32 or None: written, natural log-sum-exps.
    """
    splits, rows = part_lse.shape
    if not rows:
        return
    dim = 1 if part is None else part.shape[2]
    with torch.cuda.device_of(part_lse):
        _combine_kernel[(rows,)](
            part,
            part_lse,
            sinks,
            out,
            lse,
            *((0, 0, 0) if out is None else out.stride()[:3]),
            rows,
            splits,
            heads,
            queries,
            DV=dim,
            BLOCK_DV=power_of_two(dim),
            BLOCK_SPLITS=BLOCK_SPLITS,
            HAS_OUT=out is not None,
            HAS_SINKS=sinks is not None,
            HAS_LSE=lse is not None,
            num_warps=2 if dim <= 128 else 4,
        )
