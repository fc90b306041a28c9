"""Pooled selection in Triton: a search for the threshold of each row, then one list a head.

A key is the score's bits as int32 in the order of the scores (README.md). The search keeps a range
of keys: at least `wanted` keys of the row reach its first one, and fewer its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What may not be chosen; NaN, the first real key; the end of the range of all keys; and what must
# be chosen, whatever the threshold.
OUTSIDE = tl.constexpr(-2147483648)
FIRST = tl.constexpr(-2147483647)
END = tl.constexpr(0x7F800001)
FORCED = tl.constexpr(2147483647)
# Numbers of a row's state: the range's first key, its width, the shift of a bin, and whether it
# holds the threshold alone.
STATE = tl.constexpr(4)


@triton.jit
def _ordered(floats):
    """Turn fp32 into int32 keys in the same order: NaN lowest, -0.0 equal to 0.0."""
    # Adding zero turns -0.0 into 0.0.
    bits = (floats + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 2147483647)
    return tl.where(floats == floats, key, FIRST)


@triton.jit
def _places(BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Return the places of a tile, `[BLOCK / LANES, LANES]`: a thread loads whole rows of it.

    Counts are then added up within a thread first, and no tile changes hands between threads.
    """
    return tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _keys(scores, base, low, high, size, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Load the keys of a tile of positions, `OUTSIDE` for those that are not contested.

    The load's own mask is the row's, so that aligned rows are read 16 bytes at a time.
    """
    position = base + _places(BLOCK, LANES)
    key = _ordered(tl.load(scores + position, mask=position < size, other=0.0).to(tl.float32))
    if (base < low) | (base + BLOCK > high):
        key = tl.where((position >= low) & (position < high), key, OUTSIDE)
    return key


@triton.jit
def _put_range(state, first, width, BINS: tl.constexpr):
    """Store a range of `width` keys, and the shift that cuts it into at most `BINS` bins."""
    bit = tl.arange(0, 64)
    too_wide = (tl.zeros([64], tl.int64) + (width - 1)) >> bit >= BINS
    tl.store(state, first)
    tl.store(state + 1, width)
    tl.store(state + 2, tl.sum(too_wide.to(tl.int64), 0))
    tl.store(state + 3, (width <= 1).to(tl.int64))


@triton.jit
def _keys_of_ranks(keys, low_rank, high_rank):
    """Return a key that `low_rank` of the keys reach, and one that fewer than `high_rank` reach.

    Both are near the rank: `FIRST` if there are not so many keys, `END` for a rank of 0. The keys
    are at most 2**15: both counts go through one sum.
    """
    low = tl.zeros([], tl.int64) + FIRST
    low_end = tl.zeros([], tl.int64) + END
    high = low
    high_end = low_end
    # A range of 2**10 keys is a ten-thousandth of a score.
    while tl.maximum(low_end - low, high_end - high) > 1024:
        first = low + (low_end - low) // 2
        second = high + (high_end - high) // 2
        counts = (keys >= first.to(tl.int32)).to(tl.int32)
        counts += (keys >= second.to(tl.int32)).to(tl.int32) << 16
        count = tl.sum(counts, 0)
        enough = (count & 65535) >= low_rank
        low = tl.where(enough, first, low)
        low_end = tl.where(enough, low_end, first)
        enough = (count >> 16) >= high_rank
        high = tl.where(enough, second, high)
        high_end = tl.where(enough, high_end, second)
    return low, tl.where(high_rank > 0, high_end, END)


@triton.jit
def prepare_kernel(
    lengths, budgets, recents, starts, begins, ends, lows, highs, wanted, totals, rooms, bins,
    layers, heads, batch, sink,
    LAYERS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Compute the shares of a row's layers (`shares_of`) and their sums; clear the row's bins."""
    owner = tl.program_id(0)
    left = tl.zeros([LAYERS], tl.int64)
    contested = tl.zeros([LAYERS], tl.int64)
    for first in range(0, layers, LAYERS):
        layer = first + tl.arange(0, LAYERS)
        there = layer < layers
        r = layer * batch + owner
        end = tl.load(lengths + r, mask=there, other=0).to(tl.int64)
        begin = tl.minimum(tl.load(starts + r, mask=there, other=0).to(tl.int64), end)
        kept = tl.minimum(tl.load(budgets + r, mask=there, other=0).to(tl.int64), end - begin)
        newest = tl.minimum(tl.load(recents + r, mask=there, other=0).to(tl.int64), kept)
        oldest = tl.minimum(kept - newest, sink)
        tl.store(begins + r, begin.to(tl.int32), mask=there)
        tl.store(ends + r, end.to(tl.int32), mask=there)
        tl.store(lows + r, (begin + oldest).to(tl.int32), mask=there)
        tl.store(highs + r, (end - newest).to(tl.int32), mask=there)
        left += kept - newest - oldest
        contested += end - newest - begin - oldest
    tl.store(wanted + owner, tl.sum(left, 0) * heads)
    tl.store(totals + owner, tl.sum(contested, 0) * heads)
    tl.store(rooms + owner, owner.to(tl.int64) * 0)
    bins += owner * (BINS + 1)
    tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
    tl.store(bins + BINS, 0)


@triton.jit
def guess_kernel(
    scores, lows, highs, wanted, totals, states, stride_sr, stride_sh, pairs, heads, batch,
    SAMPLES: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Guess a row's range from a sample of all its heads' keys; a wrong guess costs time alone."""
    owner = tl.program_id(0)
    i = tl.arange(0, SAMPLES)
    each = tl.maximum(SAMPLES // pairs, 1)
    pair = i % pairs
    r = (pair // heads) * batch + owner
    # One key of each of `each` stretches of a head, at places that differ from stretch to stretch.
    turn = (i // pairs).to(tl.float32) + ((i * 40503) & 65535).to(tl.float32) * (1.0 / 65536.0)
    end = tl.load(highs + owner)
    position = (turn * (end.to(tl.float32) / each)).to(tl.int32)
    low = tl.load(lows + r)
    high = tl.load(highs + r)
    inside = (i // pairs < each) & (position >= low) & (position < high)
    place = r.to(tl.int64) * stride_sr + (pair % heads).to(tl.int64) * stride_sh + position
    floats = tl.load(scores + place, mask=inside, other=0.0).to(tl.float32)
    keys = tl.where(inside, _ordered(floats), OUTSIDE)
    found = tl.sum(inside.to(tl.int32), 0).to(tl.float32)
    left = tl.load(wanted + owner)
    share = left.to(tl.float32) / tl.maximum(tl.load(totals + owner), 1).to(tl.float32)
    rank = found * share
    # Five standard deviations of the rank of a random sample, and some keys.
    margin = 5.0 * tl.sqrt(rank) + 8.0
    low_rank = (rank + margin).to(tl.int32)
    first, past = _keys_of_ranks(keys, low_rank, (rank - margin).to(tl.int32))
    # A key that is there: it may be one that many tie at, which are counted at the range's start.
    nearest = tl.min(tl.where(keys >= first.to(tl.int32), keys, FORCED), 0).to(tl.int64)
    first = tl.where(low_rank.to(tl.float32) <= found, nearest, FIRST)
    # Nothing to choose: no key is as large as the threshold.
    first = tl.where(left > 0, first, END)
    width = tl.where(left > 0, tl.maximum(past - first, 1), 1)
    _put_range(states + owner * STATE, first, width, BINS)
    # However narrow, a guess is still to be checked.
    tl.store(states + owner * STATE + 3, (left <= 0).to(tl.int64))


@triton.jit
def bin_kernel(
    scores, lows, highs, states, bins, stride_sr, stride_sh, heads, batch, size, span,
    BINS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Count one stretch of a head's keys past the row's range, and those within it by bins.

    Few keys lie in the range, unless they all tie: those at its start are counted apart.
    """
    pair = tl.program_id(0)
    r = pair // heads
    owner = r % batch
    states += owner * STATE
    start = tl.program_id(1) * span
    low = tl.load(lows + r)
    high = tl.load(highs + r)
    begin = tl.maximum(start, low // BLOCK * BLOCK)
    end = tl.minimum(start + span, high)
    if (tl.load(states + 3) == 0) & (begin < end):
        first = tl.load(states).to(tl.int32)
        past = (tl.load(states) + tl.load(states + 1)).to(tl.int32)
        shift = tl.load(states + 2).to(tl.uint32)
        scores += r.to(tl.int64) * stride_sr + (pair % heads).to(tl.int64) * stride_sh
        bins += owner * (BINS + 1)
        more = tl.zeros([BLOCK // LANES], tl.int32)
        same = tl.zeros([BLOCK // LANES], tl.int32)
        for base in range(begin, end, BLOCK):
            key = _keys(scores, base, low, high, size, BLOCK, LANES)
            more += tl.sum((key >= past).to(tl.int32), 1)
            same += tl.sum((key == first).to(tl.int32), 1)
            offset = (key - first).to(tl.uint32, bitcast=True)
            within = (key > first) & (key < past)
            tl.atomic_add(bins + (offset >> shift).to(tl.int32), 1, mask=within, sem="relaxed")
        tl.atomic_add(bins + BINS, tl.sum(more, 0), sem="relaxed")
        tl.atomic_add(bins, tl.sum(same, 0), sem="relaxed")


@triton.jit
def narrow_kernel(bins, states, wanted, rooms, BINS: tl.constexpr):
    """Narrow a row's range to the bin that holds its threshold, and clear its bins.

    Where a guess was wrong, the range becomes what lies past it, or before it. `rooms` becomes how
    many keys that equal the range's first one are wanted, if it is the threshold.
    """
    owner = tl.program_id(0)
    states += owner * STATE
    bins += owner * (BINS + 1)
    if tl.load(states + 3) == 0:
        line = tl.arange(0, BINS)
        counts = tl.load(bins + line)
        over = tl.load(bins + BINS).to(tl.int64)
        first = tl.load(states)
        width = tl.load(states + 1)
        shift = tl.load(states + 2)
        left = tl.load(wanted + owner) - over
        at_least = tl.cumsum(counts, 0, reverse=True)
        total = tl.sum(counts, 0).to(tl.int64)
        # The largest bin that enough keys reach.
        digit = tl.max(tl.where(at_least >= left, line, 0), 0)
        above = tl.sum(tl.where(line > digit, counts, 0), 0).to(tl.int64)
        skipped = digit.to(tl.int64) << shift
        step = (digit * 0 + 1).to(tl.int64) << shift
        is_past = left <= 0
        is_before = left > total
        past = first + width
        narrowed = tl.where(is_past, END - past, tl.minimum(step, width - skipped))
        narrowed = tl.where(is_before, first - FIRST, narrowed)
        begin = tl.where(is_past, past, tl.where(is_before, FIRST, first + skipped))
        room = tl.where(is_past, left + over, tl.where(is_before, left - total, left - above))
        # All threads have read what is overwritten here.
        tl.debug_barrier()
        tl.store(bins + line, tl.zeros([BINS], tl.int32))
        tl.store(bins + BINS, 0)
        _put_range(states, begin, narrowed, BINS)
        tl.store(rooms + owner, room)


@triton.jit
def count_kernel(
    scores, begins, ends, lows, highs, states, firm, ties, stride_sr, stride_sh,
    heads, batch, size, span,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Count what one stretch of a head keeps for certain, and its keys that equal the threshold."""
    pair = tl.program_id(0)
    r = pair // heads
    start = tl.program_id(1) * span
    own = pair * tl.num_programs(1) + tl.program_id(1)
    begin = tl.maximum(start, tl.load(begins + r))
    end = tl.minimum(start + span, tl.load(ends + r))
    low = tl.load(lows + r)
    high = tl.load(highs + r)
    limit = tl.load(states + (r % batch) * STATE).to(tl.int32)
    scores += r.to(tl.int64) * stride_sr + (pair % heads).to(tl.int64) * stride_sh
    more = tl.zeros([BLOCK // LANES], tl.int32)
    same = tl.zeros([BLOCK // LANES], tl.int32)
    for base in range(tl.maximum(start, low // BLOCK * BLOCK), tl.minimum(end, high), BLOCK):
        key = _keys(scores, base, low, high, size, BLOCK, LANES)
        more += tl.sum((key > limit).to(tl.int32), 1)
        same += tl.sum((key == limit).to(tl.int32), 1)
    contested = tl.maximum(tl.minimum(end, high) - tl.maximum(begin, low), 0)
    forced = tl.maximum(end - begin, 0) - contested
    tl.store(firm + own, tl.sum(more, 0) + forced)
    tl.store(ties + own, tl.sum(same, 0))


@triton.jit
def share_kernel(
    firm, ties, rooms, taken, counts, pairs, heads, batch, splits,
    LINES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Give a row's room for ties to the first ones, by layer, head and position; count each head's.

    Stretches of a head lie side by side.
    """
    owner = tl.program_id(0)
    part = tl.arange(0, SPLITS)
    room = tl.load(rooms + owner)
    used = room * 0
    for first in range(0, pairs, LINES):
        index = first + tl.arange(0, LINES)
        pair = (index // heads * batch + owner) * heads + index % heads
        place = pair[:, None] * splits + part[None, :]
        there = (index < pairs)[:, None] & (part < splits)[None, :]
        tie = tl.load(ties + place, mask=there, other=0)
        per_line = tl.sum(tie, 1)
        earlier = (tl.cumsum(per_line, 0) - per_line)[:, None] + tl.cumsum(tie, 1) - tie
        share = tl.minimum(tl.maximum(room - used - earlier, 0), tie).to(tl.int32)
        tl.store(taken + place, share, mask=there)
        kept = share + tl.load(firm + place, mask=there, other=0)
        tl.store(counts + pair, tl.sum(kept, 1), mask=index < pairs)
        used += tl.sum(per_line, 0)


@triton.jit
def list_kernel(
    scores, begins, ends, lows, highs, states, firm, taken, indices, stride_sr, stride_sh,
    heads, batch, size, span, width,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List what one stretch of a head keeps: forced, above the threshold, and its share of ties."""
    pair = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    r = pair // heads
    start = split * span
    begin = tl.load(begins + r)
    end = tl.minimum(start + span, tl.load(ends + r))
    low = tl.load(lows + r)
    high = tl.load(highs + r)
    limit = tl.load(states + (r % batch) * STATE).to(tl.int32)
    room = tl.load(taken + pair * splits + split)
    part = tl.arange(0, SPLITS)
    firms = tl.load(firm + pair * splits + part, mask=part < split, other=0)
    shares = tl.load(taken + pair * splits + part, mask=part < split, other=0)
    used = tl.sum(firms + shares, 0)
    scores += r.to(tl.int64) * stride_sr + (pair % heads).to(tl.int64) * stride_sh
    indices += pair.to(tl.int64) * width
    met = room * 0
    for base in range(tl.maximum(start, begin // BLOCK * BLOCK), end, BLOCK):
        position = base + _places(BLOCK, LANES)
        key = _keys(scores, base, low, high, size, BLOCK, LANES)
        if (base < low) | (base + BLOCK > high):
            contested = (position >= low) & (position < high)
            forced = (position >= begin) & (position < end) & ~contested
            key = tl.where(forced, FORCED, key)
        sure = key > limit
        tie = key == limit
        # Both counts in one scan, the ties' in the upper half.
        flags = sure.to(tl.int32) + (tie.to(tl.int32) << 16)
        in_row = tl.sum(flags, 1)
        before = (tl.cumsum(in_row, 0) - in_row)[:, None] + tl.cumsum(flags, 1) - flags
        ranked = met + (before >> 16)
        slot = used + (before & 65535) + tl.minimum(ranked, room)
        tl.store(indices + slot, position, mask=sure | (tie & (ranked < room)))
        total = tl.sum(in_row, 0)
        used += total & 65535
        met += total >> 16
