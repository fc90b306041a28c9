"""Pooled selection in Triton: a radix search over all heads of a row, then one list a head.

A key is the score's bits, turned so that unsigned integers order as scores do (README.md).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys(scores, position, lo, hi):
    """Load contested scores as int64 keys 1..2**32 - 1, NaN as 0; -1 elsewhere."""
    inside = (position >= lo) & (position < hi)
    floats = tl.load(scores + position, mask=inside, other=0.0).to(tl.float32)
    bits = floats.to(tl.int32, bitcast=True)
    # -0.0 and 0.0 compare equal and must tie.
    bits = tl.where((bits & 2147483647) == 0, 0, bits)
    unsigned = bits.to(tl.int64) & 4294967295
    key = tl.where(bits < 0, 4294967295 - unsigned, unsigned + 2147483648)
    key = tl.where((bits & 2147483647) > 0x7F800000, 0, key)
    return tl.where(inside, key, -1)


@triton.jit
def histogram_kernel(
    scores, lows, highs, prefixes, bins, stride_sr, stride_sh, heads, batch,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the keys that begin with the row's prefix by their next 8 bits."""
    pair = tl.program_id(0)
    r = pair // heads
    owner = r % batch
    low = tl.load(lows + r)
    high = tl.load(highs + r)
    start = tl.program_id(1) * BLOCK
    if (start < high) & (start + BLOCK > low):
        position = start + tl.arange(0, BLOCK)
        scores += r.to(tl.int64) * stride_sr + (pair % heads).to(tl.int64) * stride_sh
        key = _keys(scores, position, low, high)
        begins = (key >> (SHIFT + 8)) == tl.load(prefixes + owner)
        digit = ((key >> SHIFT) & 255).to(tl.int32)
        counts = tl.histogram(digit, 256, mask=begins & (key >= 0))
        line = tl.arange(0, 256)
        tl.atomic_add(bins + owner * 256 + line, counts, mask=counts > 0)


@triton.jit
def narrow_kernel(bins, prefixes, wanted):
    """Lengthen a row's prefix by the digit in which its threshold lies; clear its bins."""
    row = tl.program_id(0)
    line = tl.arange(0, 256)
    counts = tl.load(bins + row * 256 + line).to(tl.int64)
    tl.store(bins + row * 256 + line, tl.zeros([256], tl.int32))
    left = tl.load(wanted + row)
    at_least = tl.cumsum(counts, 0, reverse=True)
    # The largest digit that enough keys reach; 0 where none do.
    digit = tl.max(tl.where(at_least >= left, line, 0), 0)
    above = tl.sum(tl.where(line > digit, counts, 0), 0)
    tl.store(prefixes + row, tl.load(prefixes + row) * 256 + digit)
    tl.store(wanted + row, left - above)


@triton.jit
def count_kernel(
    scores, lows, highs, thresholds, above, ties, stride_sr, stride_sh, heads, batch,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count one head's keys above the row's threshold, and those that equal it."""
    pair = tl.program_id(0)
    r = pair // heads
    low = tl.load(lows + r)
    high = tl.load(highs + r)
    limit = tl.load(thresholds + r % batch)
    scores += r.to(tl.int64) * stride_sr + (pair % heads).to(tl.int64) * stride_sh
    more = tl.zeros([BLOCK], tl.int32)
    same = tl.zeros([BLOCK], tl.int32)
    for start in range(low // BLOCK * BLOCK, high, BLOCK):
        key = _keys(scores, start + tl.arange(0, BLOCK), low, high)
        more += (key > limit).to(tl.int32)
        same += (key == limit).to(tl.int32)
    tl.store(above + pair, tl.sum(more, 0))
    tl.store(ties + pair, tl.sum(same, 0))


@triton.jit
def list_kernel(
    scores, begins, ends, lows, highs, thresholds, taken, indices, stride_sr, stride_sh,
    heads, batch, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """List one head's forced positions, its keys above the threshold and its share of the ties."""
    pair = tl.program_id(0)
    r = pair // heads
    begin = tl.load(begins + r)
    end = tl.load(ends + r)
    low = tl.load(lows + r)
    high = tl.load(highs + r)
    limit = tl.load(thresholds + r % batch)
    room = tl.load(taken + pair)
    scores += r.to(tl.int64) * stride_sr + (pair % heads).to(tl.int64) * stride_sh
    indices += pair.to(tl.int64) * width
    used = room * 0
    met = room * 0
    for start in range(begin // BLOCK * BLOCK, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        key = _keys(scores, position, low, high)
        tie = key == limit
        ranked = tl.cumsum(tie.to(tl.int32), 0)
        forced = (position >= begin) & (position < end) & ((position < low) | (position >= high))
        chosen = forced | (key > limit) | (tie & (met + ranked <= room))
        slot = used + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices + slot, position.to(tl.int32), mask=chosen)
        used += tl.sum(chosen.to(tl.int32), 0)
        met += tl.sum(tie.to(tl.int32), 0)
