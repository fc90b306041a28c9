"""The forecast of keys in Triton: features live in registers, a key is read once a launch.

A feature's place among the weights is a compile-time number, -1 where it is not asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _coded(root):
    """Return square roots of masses as the nearest uint8 codes; halves go to the even one."""
    scaled = tl.sqrt(tl.minimum(root, 1.0)) * 255.0
    # Adding 2**23 leaves no digits after the point, rounds as torch.round does, and puts the number
    # in the last bits: conversions are as slow as roots.
    return ((scaled + 8388608.0).to(tl.int32, bitcast=True) & 255).to(tl.uint8)


@triton.jit
def _codes_of(words, quad, skew, end):
    """Return the four levels of each of the keys `4 * quad` and on, out of aligned words.

    A row may begin `skew` bytes into its first word: each four codes come out of two words.
    """
    low = tl.load(words + quad, mask=(quad >= 0) & (4 * quad < end + skew), other=0)
    high = tl.load(words + quad + 1, mask=(quad >= 0) & (4 * quad + 4 < end + skew), other=0)
    word = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> (8 * skew).to(tl.uint64)
    word = word.to(tl.uint32)
    scale = 1.0 / 255.0
    return (
        (word & 255).to(tl.float32) * scale,
        ((word >> 8) & 255).to(tl.float32) * scale,
        ((word >> 16) & 255).to(tl.float32) * scale,
        (word >> 24).to(tl.float32) * scale,
    )


@triton.jit
def _numbers_of(base, quad, end):
    """Return the square roots of four fp32 masses, 0 for what is negative or outside 0..end-1."""
    roots = tl.tuple(())
    for e in tl.static_range(4):
        place = 4 * quad + e
        mass = tl.load(base + place, mask=(place >= 0) & (place < end), other=0.0)
        roots += (tl.sqrt(tl.maximum(mass.to(tl.float32), 0.0)),)
    return roots


@triton.jit
def _levels(base, quad, end, CODES: tl.constexpr, WITH_LEFT: tl.constexpr):
    """Return the levels of four keys, after those of their 8 left neighbours if asked for.

    A level is a code's share of 255, whose square is the root of the mass, or that root itself.
    """
    levels = tl.tuple(())
    if CODES:
        address = base.to(tl.int64, bitcast=True)
        skew = (address & 3).to(tl.int32)
        words = (address - skew).to(tl.pointer_type(tl.uint32), bitcast=True)
        if WITH_LEFT:
            levels = _codes_of(words, quad - 2, skew, end) + _codes_of(words, quad - 1, skew, end)
        levels = levels + _codes_of(words, quad, skew, end)
    else:
        if WITH_LEFT:
            levels = _numbers_of(base, quad - 2, end) + _numbers_of(base, quad - 1, end)
        levels = levels + _numbers_of(base, quad, end)
    return levels


@triton.jit
def _root(level, CODES: tl.constexpr):
    """Return the square root of a level's mass."""
    if CODES:
        level = level * level
    return level


@triton.jit
def _spread(levels, FADES: tl.constexpr):
    """Return the best of four keys' levels and their 8 left neighbours', faded by the distance.

    Each level is raised by its distance from the first of the twelve and lowered again after the
    maximum: what the four have in common, the middle six, is compared once.
    """
    raised = tl.tuple(())
    for i in tl.static_range(12):
        raised += (levels[i] * FADES[12 - i],)
    shared = raised[3]
    for i in tl.static_range(4, 9):
        shared = tl.maximum(shared, raised[i])
    left = tl.maximum(raised[1], raised[2])
    right = tl.maximum(raised[9], raised[10])
    return (
        tl.maximum(shared, tl.maximum(left, raised[0])) * (1.0 / FADES[4]),
        tl.maximum(shared, tl.maximum(left, raised[9])) * (1.0 / FADES[3]),
        tl.maximum(shared, tl.maximum(right, raised[2])) * (1.0 / FADES[2]),
        tl.maximum(shared, tl.maximum(right, raised[11])) * (1.0 / FADES[1]),
    )


@triton.jit
def _with_key(sums, found, y, CHOSEN: tl.constexpr, COUNT: tl.constexpr):
    """Return the sums of `y f f'`, lower half, and `y**2 f`, with one more key of each lane."""
    after = tl.tuple(())
    for i in tl.static_range(COUNT):
        weighted = found[CHOSEN[i]] * y
        for j in tl.static_range(i + 1):
            after += (sums[i * (i + 3) // 2 + j] + weighted * found[CHOSEN[j]],)
        after += (sums[i * (i + 3) // 2 + i + 1] + weighted * y,)
    return after


@triton.jit
def moments_kernel(
    now, last, average, peak, matches, target, sums,
    stride_sr, stride_sh, stride_mr, stride_tr, stride_th,
    heads, size, span, splits,
    CODES: tl.constexpr, LANES: tl.constexpr, CHOSEN: tl.constexpr, COUNT: tl.constexpr,
    FADES: tl.constexpr, HAS_MATCHES: tl.constexpr, CONSTANT_ROOT: tl.constexpr,
):  # fmt: skip
    """Sum `y f f'` and `y**2 f` over one stretch of one head's keys, four keys a lane at a time.

    Strides of the record are those of `now`: the four are laid out alike. What no chosen feature
    needs is compiled away.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    r = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    place = r * stride_sr + h * stride_sh
    target += r * stride_tr + h * stride_th
    totals = tl.tuple(())
    for _ in tl.static_range(COUNT * (COUNT + 3) // 2):
        totals += (tl.zeros([LANES], tl.float32),)
    for start in range(split * span, tl.minimum(split * span + span, size), 4 * LANES):
        quad = start // 4 + tl.arange(0, LANES)
        news = _levels(now + place, quad, size, CODES, True)
        lasts = _levels(last + place, quad, size, CODES, True)
        means = _levels(average + place, quad, size, CODES, True)
        peaks = _levels(peak + place, quad, size, CODES, False)
        spread_now = _spread(news, FADES)
        spread_last = _spread(lasts, FADES)
        spread_average = _spread(means, FADES)
        for e in tl.static_range(4):
            inside = 4 * quad + e < size
            y = tl.load(target + 4 * quad + e, mask=inside, other=0.0)
            match = tl.zeros([LANES], tl.float32)
            if HAS_MATCHES:
                match = tl.load(matches + r * stride_mr + 4 * quad + e, mask=inside, other=0.0)
                match = tl.sqrt(tl.maximum(match, 0.0))
            # In the order of `FEATURES`.
            found = (
                _root(news[8 + e], CODES), _root(lasts[8 + e], CODES),
                _root(means[8 + e], CODES), _root(peaks[e], CODES),
                _root(spread_now[e], CODES), _root(spread_last[e], CODES),
                _root(spread_average[e], CODES),
                _root(news[7 + e], CODES), _root(news[6 + e], CODES), _root(news[5 + e], CODES),
                match, tl.full([LANES], CONSTANT_ROOT, tl.float32),
            )  # fmt: skip
            totals = _with_key(totals, found, y, CHOSEN, COUNT)
    out = sums + (pair.to(tl.int64) * splits + split) * (COUNT * (COUNT + 1))
    for i in tl.static_range(COUNT):
        for j in tl.static_range(i + 1):
            total = tl.sum(totals[i * (i + 3) // 2 + j], 0)
            tl.store(out + i * (COUNT + 1) + j, total)
            tl.store(out + j * (COUNT + 1) + i, total)
        tl.store(out + i * (COUNT + 1) + COUNT, tl.sum(totals[i * (i + 3) // 2 + i + 1], 0))


@triton.jit
def _four(base, start, size, end, LANES: tl.constexpr):
    """Load four numbers a lane from `start` on, as fp32, 0 outside 0..end-1.

    A tile is loaded whole, 16 bytes a lane where rows are aligned, and taken apart in registers.
    """
    position = start + tl.arange(0, 4 * LANES)
    inside = (position >= 0) & (position < size)
    tile = tl.load(base + position, mask=inside, other=0.0).to(tl.float32)
    if start + 4 * LANES > end:
        tile = tl.where(position < end, tile, 0.0)
    even, odd = tl.split(tl.reshape(tile, [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _put_four(base, start, size, first, second, third, fourth, LANES: tl.constexpr):
    """Store four numbers a lane from `start` on, within 0..size-1."""
    tile = tl.join(tl.join(first, third), tl.join(second, fourth))
    position = start + tl.arange(0, 4 * LANES)
    tile = tl.reshape(tile, [4 * LANES])
    tl.store(base + position, tile.to(base.dtype.element_ty), mask=position < size)


@triton.jit
def _twelve(base, start, size, end, LANES: tl.constexpr):
    """Load four numbers a lane after their 8 left neighbours."""
    left = _four(base, start - 8, size, end, LANES) + _four(base, start - 4, size, end, LANES)
    return left + _four(base, start, size, end, LANES)


@triton.jit
def _remembered(base, start, size, CODES: tl.constexpr, LANES: tl.constexpr):
    """Return the remembered masses of four keys a lane, after their 8 left neighbours'."""
    if CODES:
        quad = start // 4 + tl.arange(0, LANES)
        codes = _levels(base, quad, size, True, True)
        masses = tl.tuple(())
        for i in tl.static_range(12):
            root = codes[i] * codes[i]
            masses += (root * root,)
    else:
        masses = _twelve(base, start, size, size, LANES)
    return masses


@triton.jit
def _root_of(mass):
    """Return the square root of a mass, 0 of a negative one."""
    return tl.sqrt(tl.maximum(mass, 0.0))


@triton.jit
def _put_state(base, start, size, masses, CODES: tl.constexpr, LANES: tl.constexpr):
    """Store what is remembered of the last four of `masses`, as codes or as they are."""
    kept = tl.tuple(())
    for i in tl.static_range(8, 12):
        if CODES:
            kept += (_coded(_root_of(masses[i])),)
        else:
            kept += (masses[i],)
    _put_four(base, start, size, kept[0], kept[1], kept[2], kept[3], LANES)


@triton.jit
def mass_kernel(
    now, last, average, peak, matches, weights, lengths, mass, new_average, new_peak,
    stride_nr, stride_nh, stride_lr, stride_lh, stride_sr, stride_sh, stride_mr,
    heads, size, span,
    FIRST: tl.constexpr, CODES: tl.constexpr, LANES: tl.constexpr, CHOSEN: tl.constexpr,
    COUNT: tl.constexpr, FADES: tl.constexpr, HAS_MATCHES: tl.constexpr,
    CONSTANT_ROOT: tl.constexpr, AVERAGE_DECAY: tl.constexpr, PEAK_DECAY: tl.constexpr,
):  # fmt: skip
    """Follow the record of one stretch of one head's keys, and forecast their mass.

    The spread of the new average needs its left neighbours', which are followed here once more.
    What no chosen feature needs is compiled away.
    """
    pair = tl.program_id(0)
    r = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    length = tl.load(lengths + r).to(tl.int32)
    now += r * stride_nr + h * stride_nh
    last += r * stride_lr + h * stride_lh
    average += r * stride_sr + h * stride_sh
    peak += r * stride_sr + h * stride_sh
    own = pair.to(tl.int64) * size
    shares = tl.tuple(())
    for i in tl.static_range(COUNT):
        shares += (tl.load(weights + pair * COUNT + i),)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, size), 4 * LANES):
        news = _twelve(now, start, size, length, LANES)
        lasts = _twelve(last, start, size, length, LANES)
        means = news
        peaks = news
        if not FIRST:
            old = _remembered(average, start, size, CODES, LANES)
            most = _remembered(peak, start, size, CODES, LANES)
            means = tl.tuple(())
            peaks = tl.tuple(())
            for i in tl.static_range(12):
                means += (news[i] + AVERAGE_DECAY * (old[i] - news[i]),)
                peaks += (tl.maximum(news[i], PEAK_DECAY * most[i]),)
        spread_now = _spread(news, FADES)
        spread_last = _spread(lasts, FADES)
        spread_average = _spread(means, FADES)
        match = (tl.zeros([LANES], tl.float32),) * 4
        if HAS_MATCHES:
            match = _four(matches + r * stride_mr, start, size, size, LANES)
        totals = tl.tuple(())
        for e in tl.static_range(4):
            # In the order of `FEATURES`.
            found = (
                news[8 + e], lasts[8 + e], means[8 + e], peaks[8 + e],
                spread_now[e], spread_last[e], spread_average[e],
                news[7 + e], news[6 + e], news[5 + e], match[e],
            )  # fmt: skip
            total = tl.zeros([LANES], tl.float32)
            for i in tl.static_range(COUNT):
                if CHOSEN[i] < 11:
                    total += shares[i] * _root_of(found[CHOSEN[i]])
                else:
                    total += shares[i] * CONSTANT_ROOT
            total = tl.maximum(total, 0.0)
            totals += (total * total,)
        _put_four(mass + own, start, size, totals[0], totals[1], totals[2], totals[3], LANES)
        _put_state(new_average + own, start, size, means, CODES, LANES)
        _put_state(new_peak + own, start, size, peaks, CODES, LANES)
