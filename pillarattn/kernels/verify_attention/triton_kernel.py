"""Verify attention in Triton: all rows of a KV head on one read of its keys and values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def verify_kernel(
    query,
    keys,
    values,
    lengths,
    sinks,
    normaliser,
    out,
    part,
    lse,
    pooled,
    stride_qb,
    stride_qh,
    stride_qq,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_oq,
    stride_pb,
    stride_ph,
    kv_heads,
    queries,
    scale_log2,
    softcap,
    window,
    split_keys,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
    BRANCH: tl.constexpr,
    DIRECT: tl.constexpr,
    POOLED: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Attend with one block of packed rows to the keys of one split (README.md: grid)."""
    pair = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    b = (pair // kv_heads).to(tl.int64)
    h = (pair % kv_heads).to(tl.int64)
    length = tl.load(lengths + b).to(tl.int32)

    # Packed row i * G + g is query i of the group's head g.
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < queries * G
    i = row // G
    head = h * G + row % G
    own = length - queries + i
    lowest = length - queries + (block * BLOCK_M) // G
    highest = length - queries + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // G, queries - 1)
    first = split * split_keys
    last = tl.minimum(tl.minimum(highest + 1, length), first + split_keys)
    if HAS_WINDOW:
        first = tl.maximum(first, lowest - window + 1)
        # Steps start at multiples of their size, wherever the rows begin: the same for any rows.
        first = tl.maximum(first, 0) // BLOCK_N * BLOCK_N

    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_DV)
    q = tl.load(
        query
        + b * stride_qb
        + head[:, None] * stride_qh
        + i[:, None].to(tl.int64) * stride_qq
        + columns[None, :],
        mask=real[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    keys += b * stride_kb + h * stride_kh
    values += b * stride_vb + h * stride_vh
    if POOLED:
        known = tl.load(normaliser + (b * kv_heads * G + head) * queries + i, mask=real, other=0.0)
        known = known * 1.4426950408889634
        pooled += b * stride_pb + h * stride_ph
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK_N)
        inside = position < last
        offset = position.to(tl.int64)
        if BLOCK_D == D:
            k = tl.load(
                keys + offset[:, None] * stride_ks + columns[None, :],
                mask=inside[:, None],
                other=0.0,
            )
        else:
            k = tl.load(
                keys + offset[:, None] * stride_ks + columns[None, :],
                mask=inside[:, None] & (columns < D)[None, :],
                other=0.0,
            )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)); the factors carry the base 2 of the exponential.
            raised = tl.exp2(logits * (scale_log2 * 2.0 / softcap))
            logits = softcap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + raised))
        else:
            logits = logits * scale_log2
        if BRANCH:
            partly = (start + BLOCK_N > lowest + 1) | (start + BLOCK_N > last)
            if HAS_WINDOW:
                partly = partly | (start <= highest - window)
            if partly:
                visible = (position[None, :] <= own[:, None]) & inside[None, :]
                if HAS_WINDOW:
                    visible = visible & (position[None, :] > own[:, None] - window)
                logits = tl.where(visible, logits, -float("inf"))
        else:
            visible = (position[None, :] <= own[:, None]) & inside[None, :]
            if HAS_WINDOW:
                visible = visible & (position[None, :] > own[:, None] - window)
            logits = tl.where(visible, logits, -float("inf"))
        peak = tl.maximum(best, tl.max(logits, 1))
        # A row that has seen nothing yet: -inf - -inf is NaN.
        base = tl.where(peak > -float("inf"), peak, 0.0)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
        best = peak
        if HAS_VALUES:
            if BLOCK_DV == DV:
                v = tl.load(
                    values + offset[:, None] * stride_vs + value_columns[None, :],
                    mask=inside[:, None],
                    other=0.0,
                )
            else:
                v = tl.load(
                    values + offset[:, None] * stride_vs + value_columns[None, :],
                    mask=inside[:, None] & (value_columns < DV)[None, :],
                    other=0.0,
                )
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        if POOLED:
            # The same weights, seen from the normaliser: no second exponential per key.
            share = tl.exp2(tl.minimum(base - known, 100.0)) / (queries * G)
            share = tl.where(real, share, 0.0)
            score = tl.sum(weights * share[:, None], 0)
            tl.store(pooled + position, score.to(pooled.dtype.element_ty), mask=inside)

    seen = total > 0.0
    if DIRECT:
        base = tl.where(seen, best, 0.0)
        if HAS_SINKS:
            extra = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            extra = extra * 1.4426950408889634
            base = tl.where(seen, tl.maximum(best, extra), 0.0)
            shrink = tl.exp2(best - base)
            total = total * shrink + tl.where(seen, tl.exp2(extra - base), 0.0)
            acc = acc * shrink[:, None]
        if HAS_VALUES:
            acc = acc / tl.where(seen, total, 1.0)[:, None]
            tl.store(
                out
                + b * stride_ob
                + head[:, None] * stride_oh
                + i[:, None].to(tl.int64) * stride_oq
                + value_columns[None, :],
                acc.to(out.dtype.element_ty),
                mask=real[:, None] & (value_columns < DV)[None, :],
            )
        if HAS_LSE:
            end = (base + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453
            tl.store(
                lse + (b * kv_heads * G + head) * queries + i,
                tl.where(seen, end, -float("inf")),
                mask=real,
            )
    else:
        rows = tl.num_programs(0).to(tl.int64) * G * queries
        place = split * rows + (b * kv_heads * G + head) * queries + i
        end = tl.where(seen, best + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
        tl.store(lse + place, end, mask=real)
        if HAS_VALUES:
            acc = acc / tl.where(seen, total, 1.0)[:, None]
            tl.store(
                part + place[:, None] * DV + value_columns[None, :],
                acc,
                mask=(real & seen)[:, None] & (value_columns < DV)[None, :],
            )
