"""Mixed attention in Triton: persistent programs walk a list of gathers (README.md)."""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes and alignments change from pass to pass: none of them makes another kernel.
_SIZES = (
    "stride_tb", "stride_ib", "stride_ih", "stride_lb", "stride_lh", "score_rows", "score_size",
    "kept_width", "pairs", "all_rows", "window", "split_places",
)  # fmt: skip
_POINTERS = (
    "row_starts", "lengths", "block_table", "indices", "slots", "counts", "tail_start", "items",
    "starts", "splits", "kept_lse", "kept_place", "score_place", "first_place",
)  # fmt: skip


@triton.jit
def _entry_of(slots, table, place, count, tail, last, BLOCK: tl.constexpr):
    """Return what says where each place of a reading list lies: its slot, or in the tail a block.

    Without a selection (count -1) all of the list is its tail, which begins at 0.
    """
    position = tail + place - tl.maximum(count, 0)
    where = tl.where(place < count, slots + place, table + position // BLOCK)
    return tl.load(where, mask=place < last, other=0)


@triton.jit
def _ends(base, weight):
    """Return base + log2(weight) of whole bases, which again only their product decides."""
    bits = weight.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return (base + ((bits >> 23) - 127).to(tl.float32)) + tl.log2(fraction)


@triton.jit
def _attend(
    query, keys, values, indices, slots, table, sinks, out, part, part_lse, lse,
    kept_lse, kept_at, scores,
    stride_qt, stride_qh, stride_ks, stride_vs, stride_ot, stride_oh, stride_si,
    first_row, rows, length, count, tail, head, block, split, splits, all_rows, adds,
    score_rows, score_size, kept_width, scale_log2, softcap, window, split_places,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, TAKEN_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_KEPT: tl.constexpr, IS_SCORED: tl.constexpr,
    IS_BASED: tl.constexpr, IS_POOLED: tl.constexpr,
):  # fmt: skip
    """Attend with one block of a request's packed rows to one stretch of its reading list.

    `IS_BASED` takes weights relative to the known normalisers, and nothing waits for the largest
    logit. It returns whether that served; if not, no output is written, and undefined scores are.
    """
    line = tl.arange(0, BLOCK_M)
    packed = block * TAKEN_M + line
    real = packed < rows * G
    if TAKEN_M < BLOCK_M:
        real = real & (line < TAKEN_M)
    i = packed // G
    query_head = head * G + packed % G
    own = length - rows + i
    lowest = length - rows + (block * TAKEN_M) // G
    highest = length - rows + tl.minimum((block * TAKEN_M + TAKEN_M - 1) // G, rows - 1)
    first = split * split_places
    if IS_SCORED:
        # What no row sees is scored too, with 0.
        total = length
    else:
        total = tl.where(
            count < 0, tl.minimum(highest + 1, length), count + tl.maximum(length - tail, 0)
        )
    last = tl.minimum(total, first + split_places)
    newest = tl.where(count < 0, own, total)
    if HAS_WINDOW and not IS_SCORED:
        # Only where places are positions; steps start at multiples of their size.
        oldest = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        first = tl.where(count < 0, tl.maximum(first, oldest), first)
    tail = tl.where(count < 0, 0, tail)

    columns = tl.arange(0, BLOCK_D)
    value_columns = tl.arange(0, BLOCK_DV)
    row = (first_row + i).to(tl.int64)
    q = tl.load(
        query + row[:, None] * stride_qt + query_head[:, None] * stride_qh + columns[None, :],
        mask=real[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    if IS_SCORED:
        # Rows past the drafted ones take the normaliser of the one before.
        drafted = tl.minimum(i, tl.maximum(rows - 2, 0))
        known = tl.load(
            kept_lse + drafted * HEADS + query_head,
            mask=real & (drafted < kept_width),
            other=float("inf"),
        )
        # One that is not finite gives no share; NaN is below nothing.
        known = tl.where(tl.abs(known) < float("inf"), known * 1.4426950408889634, float("inf"))
        if IS_BASED:
            is_known = known < float("inf")
            known = tl.where(is_known, known, 0.0)
            nearest = tl.floor(known + 0.5)
            # Of weights relative to whole numbers to shares.
            factor = tl.exp2(nearest - known)
        if IS_POOLED:
            # Lines of nobody see nothing, so that they add nothing.
            newest = tl.where(real, newest, -1)
        else:
            pool_line = tl.arange(0, BLOCK_I)
            pooled_row = block * (TAKEN_M // G) + pool_line
            is_pooled = (line // G)[None, :] == pool_line[:, None]
            if IS_BASED:
                pool = tl.where(is_pooled, factor[None, :], 0.0).to(values.dtype.element_ty)
            written = (pooled_row < rows) & (pooled_row < score_rows) & (pool_line < TAKEN_M // G)
            score_line = scores + pooled_row.to(tl.int64) * stride_si
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    steps = tl.arange(0, BLOCK_N)
    # Looked up one step ahead, by one load: keys that wait for a chain of loads are not queued.
    entry = _entry_of(slots, table, first + steps, count, tail, last, BLOCK)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        place = start + steps
        inside = place < last
        position = tail + place - tl.maximum(count, 0)
        slot = tl.where(place < count, entry, entry * BLOCK + position % BLOCK).to(tl.int64)
        entry = _entry_of(slots, table, place + BLOCK_N, count, tail, last, BLOCK)
        if BLOCK_D == D:
            k = tl.load(
                keys + slot[:, None] * stride_ks + columns[None, :],
                mask=inside[:, None],
                other=0.0,
            )
        else:
            k = tl.load(
                keys + slot[:, None] * stride_ks + columns[None, :],
                mask=inside[:, None] & (columns < D)[None, :],
                other=0.0,
            )
        if BLOCK_DV == DV:
            v = tl.load(
                values + slot[:, None] * stride_vs + value_columns[None, :],
                mask=inside[:, None],
                other=0.0,
            )
        else:
            v = tl.load(
                values + slot[:, None] * stride_vs + value_columns[None, :],
                mask=inside[:, None] & (value_columns < DV)[None, :],
                other=0.0,
            )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (1 + exp(2x)); the factors carry the base 2 of the exponential.
            raised = tl.exp2(logits * (scale_log2 * 2.0 / softcap))
            logits = softcap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + raised))
        else:
            logits = logits * scale_log2
        if query.dtype.element_ty != tl.float32:
            # To 2 ** -16 or what fp32 has at this size: less a whole base, which is then exact,
            # all bases give the same bits but for a power of two.
            logits = (logits + 192.0) - 192.0
        # A draft sees all of its list; of other rows places are positions.
        visible = (place[None, :] <= newest[:, None]) & inside[None, :]
        if HAS_WINDOW:
            listed = tl.load(indices + place, mask=(place < count) & inside, other=0)
            position = tl.where(place < count, listed, position)
            visible = visible & (position[None, :] > own[:, None] - window)
        logits = tl.where(visible, logits, -float("inf"))
        if IS_BASED:
            weights = tl.exp2(logits - nearest[:, None])
            weight += tl.sum(weights, 1)
            if IS_POOLED:
                shares = weights * factor[:, None]
            weights = weights.to(v.dtype)
            acc = tl.dot(weights, v, acc, input_precision="ieee")
        else:
            peak = tl.maximum(best, tl.ceil(tl.max(logits, 1)))
            # A row that has seen nothing yet: -inf - -inf is NaN.
            base = tl.where(peak > -float("inf"), peak, 0.0)
            weights = tl.exp2(logits - base[:, None])
            shrink = tl.exp2(best - base)
            weight = weight * shrink + tl.sum(weights, 1)
            if IS_SCORED:
                # 2**15 is within fp16, which the factors are multiplied in.
                factor = tl.exp2(tl.minimum(base - known, 15.0))
                if IS_POOLED:
                    shares = weights * factor[:, None]
                else:
                    pool = tl.where(is_pooled, factor[None, :], 0.0).to(v.dtype)
            weights = weights.to(v.dtype)
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
            best = peak
        if IS_SCORED and IS_POOLED:
            share = tl.sum(shares, 0) / (rows * G)
            kept_scores = inside & (place < score_size)
            if not IS_BASED:
                share += tl.load(scores + place, mask=kept_scores & (adds > 0), other=0.0)
            tl.store(scores + place, share, mask=kept_scores)
        elif IS_SCORED:
            share = tl.dot(pool, weights, input_precision="ieee") / G
            tl.store(
                score_line[:, None] + place[None, :],
                share,
                mask=written[:, None] & (inside & (place < score_size))[None, :],
            )

    serves = True
    if IS_BASED:
        best = nearest
        # Too large a share (its factor is below 1.5), or so small a sum that what it is of may have
        # been lost (a stretch of which a row sees nothing has none). NaN is in no range.
        fits = is_known & (weight <= 16384.0)
        sees_nothing = own < first
        if HAS_WINDOW:
            sees_nothing = sees_nothing | (last <= own - window + 1)
        fits = fits & ((weight >= 5.421010862427522e-20) | sees_nothing)
        serves = tl.sum((real & (fits == 0)).to(tl.int32), 0) == 0
        real = real & serves
    seen = weight > 0.0
    if splits == 1:
        base = tl.where(seen, best, 0.0)
        if HAS_SINKS:
            extra = tl.load(sinks + query_head, mask=real, other=0.0).to(tl.float32)
            extra = extra * 1.4426950408889634
            # A sink of -inf takes nothing: -inf - -inf is NaN.
            above = tl.where(extra > -float("inf"), tl.ceil(extra), 0.0)
            base = tl.where(extra > -float("inf"), tl.maximum(best, above), best)
            base = tl.where(seen, base, 0.0)
            shrink = tl.exp2(best - base)
            sunk = tl.exp2(extra - above) * tl.exp2(above - base)
            weight = weight * shrink + tl.where(seen, sunk, 0.0)
            acc = acc * shrink[:, None]
        acc = acc / tl.where(seen, weight, 1.0)[:, None]
        tl.store(
            out + row[:, None] * stride_ot + query_head[:, None] * stride_oh
            + value_columns[None, :],
            acc.to(out.dtype.element_ty),
            mask=real[:, None] & (value_columns < DV)[None, :],
        )  # fmt: skip
        if HAS_LSE or HAS_KEPT:
            end = _ends(base, tl.where(seen, weight, 1.0)) * 0.6931471805599453
            end = tl.where(seen, end, -float("inf"))
        if HAS_LSE:
            tl.store(lse + row * HEADS + query_head, end, mask=real)
        if HAS_KEPT:
            is_kept = (i == 0) & (kept_at > 0) & (kept_at <= kept_width)
            tl.store(kept_lse + (kept_at - 1) * HEADS + query_head, end, mask=is_kept)
    else:
        place = (split * all_rows + row) * HEADS + query_head
        end = tl.where(seen, _ends(best, tl.where(seen, weight, 1.0)), -float("inf"))
        tl.store(part_lse + place, end, mask=real)
        acc = acc / tl.where(seen, weight, 1.0)[:, None]
        tl.store(
            part + place[:, None] * DV + value_columns[None, :],
            acc,
            mask=(real & seen)[:, None] & (value_columns < DV)[None, :],
        )
    return serves


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def mixed_kernel(
    query, key_pool, value_pool, row_starts, lengths, block_table, indices, slots, counts,
    tail_start, sinks, items, starts, splits, out, part, part_lse, lse,
    kept_lse, kept_place, scores, score_place, first_place,
    stride_qt, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh, stride_tb, stride_ib,
    stride_ih, stride_lb, stride_lh, stride_ot, stride_oh, stride_sv, stride_sh, stride_si,
    score_rows, score_size, kept_width,
    pairs, kv_heads, all_rows, scale_log2, softcap, window, split_places,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, FEW_M: tl.constexpr, BLOCK_M: tl.constexpr, TAKEN_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SCORED_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
    SCORED_STAGES: tl.constexpr, RARE_M: tl.constexpr, RARE_TAKEN: tl.constexpr,
    RARE_N: tl.constexpr, RARE_I: tl.constexpr, RARE_STAGES: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_FIRST: tl.constexpr,
    IS_BASED: tl.constexpr, IS_POOLED: tl.constexpr,
):  # fmt: skip
    """Walk the items of the work list, every program its share."""
    for item in range(tl.program_id(0), tl.load(starts + pairs), tl.num_programs(0)):
        pair = tl.load(items + item)
        b = (pair // kv_heads).to(tl.int64)
        head = pair % kv_heads
        first_row = tl.load(row_starts + b).to(tl.int32)
        rows = tl.load(row_starts + b + 1).to(tl.int32) - first_row
        length = tl.load(lengths + b).to(tl.int32)
        count = tl.load(counts + pair).to(tl.int32)
        tail = tl.load(tail_start + b).to(tl.int32)
        pieces = tl.load(splits + pair)
        # Blocks of rows that read the same keys come one after the other.
        few = rows * G <= FEW_M
        blocks = tl.where(few, 1, (rows * G + TAKEN_M - 1) // TAKEN_M)
        local = item - tl.load(starts + pair)
        block = local % blocks
        split = local // blocks
        keys = key_pool + head.to(tl.int64) * stride_kh
        values = value_pool + head.to(tl.int64) * stride_vh
        chosen = indices + b * stride_ib + head.to(tl.int64) * stride_ih
        listed = slots + b * stride_lb + head.to(tl.int64) * stride_lh
        table = block_table + b * stride_tb
        kept, kept_at, line = kept_lse, 0, scores
        if HAS_KEPT:
            kept = kept_lse + b * kept_width * HEADS
            kept_at = tl.load(kept_place + b).to(tl.int32)
            place = tl.load(score_place + b).to(tl.int64)
            is_scored = place > 0
            if HAS_FIRST:
                place += tl.load(first_place).to(tl.int64)
            line = scores + (place - 1) * stride_sv + head.to(tl.int64) * stride_sh
        # A loop of its own: those that are not scored pay nothing.
        if HAS_KEPT and is_scored:
            serves = False
            if IS_BASED:
                serves = _attend(
                    query, keys, values, chosen, listed, table, sinks, out, part, part_lse, lse,
                    kept, kept_at, line,
                    stride_qt, stride_qh, stride_ks, stride_vs, stride_ot, stride_oh, stride_si,
                    first_row, rows, length, count, tail, head, block, split, pieces, all_rows, 0,
                    score_rows, score_size, kept_width, scale_log2, softcap, window, split_places,
                    G, HEADS, D, DV, BLOCK, BLOCK_M, TAKEN_M, SCORED_N, BLOCK_D, BLOCK_DV,
                    BLOCK_I, SCORED_STAGES, HAS_SINKS, HAS_CAP, HAS_WINDOW, HAS_LSE, False, True,
                    True, IS_POOLED,
                )  # fmt: skip
            if serves == 0:
                # Rare: few rows at a time, for which the registers that others leave are enough.
                for part_block in range(TAKEN_M // RARE_TAKEN):
                    few_block = block * (TAKEN_M // RARE_TAKEN) + part_block
                    if IS_BASED:
                        # Other threads have written what each part writes anew, or adds to.
                        tl.debug_barrier()
                    if few_block * RARE_TAKEN < rows * G:
                        _attend(
                            query, keys, values, chosen, listed, table, sinks, out, part,
                            part_lse, lse, kept, kept_at, line,
                            stride_qt, stride_qh, stride_ks, stride_vs, stride_ot, stride_oh,
                            stride_si, first_row, rows, length, count, tail, head, few_block,
                            split, pieces, all_rows, part_block, score_rows, score_size, kept_width,
                            scale_log2, softcap, window, split_places,
                            G, HEADS, D, DV, BLOCK, RARE_M, RARE_TAKEN, RARE_N, BLOCK_D, BLOCK_DV,
                            RARE_I, RARE_STAGES, HAS_SINKS, HAS_CAP, HAS_WINDOW, HAS_LSE, False,
                            True, False, IS_POOLED,
                        )  # fmt: skip
        elif FEW_M < BLOCK_M and few:
            _attend(
                query, keys, values, chosen, listed, table, sinks, out, part, part_lse, lse,
                kept, kept_at, line,
                stride_qt, stride_qh, stride_ks, stride_vs, stride_ot, stride_oh, stride_si,
                first_row, rows, length, count, tail, head, block, split, pieces, all_rows, 0,
                score_rows, score_size, kept_width, scale_log2, softcap, window, split_places,
                G, HEADS, D, DV, BLOCK, FEW_M, FEW_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                BLOCK_I, STAGES, HAS_SINKS, HAS_CAP, HAS_WINDOW, HAS_LSE, HAS_KEPT, False,
                False, False,
            )  # fmt: skip
        else:
            _attend(
                query, keys, values, chosen, listed, table, sinks, out, part, part_lse, lse,
                kept, kept_at, line,
                stride_qt, stride_qh, stride_ks, stride_vs, stride_ot, stride_oh, stride_si,
                first_row, rows, length, count, tail, head, block, split, pieces, all_rows, 0,
                score_rows, score_size, kept_width, scale_log2, softcap, window, split_places,
                G, HEADS, D, DV, BLOCK, BLOCK_M, TAKEN_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                BLOCK_I, STAGES, HAS_SINKS, HAS_CAP, HAS_WINDOW, HAS_LSE, HAS_KEPT, False,
                False, False,
            )  # fmt: skip
