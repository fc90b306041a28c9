"""The forecast of keys in Triton: features live in registers, a key is read once a launch.

A feature's place among the weights is a compile-time number, -1 where it is not asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mass_at(base, position, lo, hi, CODES: tl.constexpr):
    """Load remembered masses as fp32, 0 outside lo..hi-1."""
    inside = (position >= lo) & (position < hi)
    if CODES:
        root = tl.load(base + position, mask=inside, other=0).to(tl.float32) * (1.0 / 255.0)
        root = root * root
        return root * root
    return tl.load(base + position, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _spread_at(base, position, hi, CODES: tl.constexpr):
    """Return each key's best of its own mass and its 8 left neighbours', less a fifth a step."""
    best = _mass_at(base, position, 0, hi, CODES)
    fade = 1.0
    for step in tl.static_range(1, 9):
        fade = fade * 0.8
        best = tl.maximum(best, _mass_at(base, position - step, 0, hi, CODES) * fade)
    return best


@triton.jit
def _coded(mass):
    """Return masses as the nearest uint8 code of their fourth root; halves go to the even one."""
    scaled = tl.sqrt(tl.sqrt(tl.minimum(tl.maximum(mass, 0.0), 1.0))) * 255.0
    # Adding 2**23 leaves no digits after the point, and rounds as torch.round does.
    return ((scaled + 8388608.0) - 8388608.0).to(tl.uint8)


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
def _spread_roots(levels, CODES: tl.constexpr, FADES: tl.constexpr):
    """Return the roots of the best of four keys' masses and their 8 left neighbours', faded.

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
    first = tl.maximum(shared, tl.maximum(left, raised[0]))
    second = tl.maximum(shared, tl.maximum(left, raised[9]))
    third = tl.maximum(shared, tl.maximum(right, raised[2]))
    fourth = tl.maximum(shared, tl.maximum(right, raised[11]))
    return (
        _root(first * (1.0 / FADES[4]), CODES),
        _root(second * (1.0 / FADES[3]), CODES),
        _root(third * (1.0 / FADES[2]), CODES),
        _root(fourth * (1.0 / FADES[1]), CODES),
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
        spread_now = _spread_roots(news, CODES, FADES)
        spread_last = _spread_roots(lasts, CODES, FADES)
        spread_average = _spread_roots(means, CODES, FADES)
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
                spread_now[e], spread_last[e], spread_average[e],
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
def mass_kernel(
    now, last, average, peak, matches, weights, lengths, mass, new_average, new_peak,
    stride_nr, stride_nh, stride_lr, stride_lh, stride_sr, stride_sh, stride_mr,
    heads, size,
    FIRST: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
    NOW: tl.constexpr, LAST: tl.constexpr, AVERAGE: tl.constexpr, PEAK: tl.constexpr,
    SPREAD_NOW: tl.constexpr, SPREAD_LAST: tl.constexpr, SPREAD_AVERAGE: tl.constexpr,
    LEFT_1: tl.constexpr, LEFT_2: tl.constexpr, LEFT_3: tl.constexpr,
    MATCH: tl.constexpr, CONSTANT: tl.constexpr, COUNT: tl.constexpr,
    HAS_MATCHES: tl.constexpr, CONSTANT_MASS: tl.constexpr,
    AVERAGE_DECAY: tl.constexpr, PEAK_DECAY: tl.constexpr,
):  # fmt: skip
    """Follow the record of one stretch of one head's keys, and forecast their mass.

    The spread of the new average needs its left neighbours', which are followed here once more.
    """
    pair = tl.program_id(0)
    r = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths + r).to(tl.int32)
    now += r * stride_nr + h * stride_nh
    last += r * stride_lr + h * stride_lh
    average += r * stride_sr + h * stride_sh
    peak += r * stride_sr + h * stride_sh
    weights += pair.to(tl.int64) * COUNT
    inside = position < size

    here = _mass_at(now, position, 0, length, False)
    mean, most = here, here
    if not FIRST:
        before = _mass_at(average, position, 0, size, CODES)
        mean = here + AVERAGE_DECAY * (before - here)
        most = tl.maximum(here, PEAK_DECAY * _mass_at(peak, position, 0, size, CODES))
    total = tl.zeros([BLOCK], tl.float32)
    if NOW >= 0:
        total += tl.load(weights + NOW) * tl.sqrt(tl.maximum(here, 0.0))
    if LAST >= 0:
        one = _mass_at(last, position, 0, length, False)
        total += tl.load(weights + LAST) * tl.sqrt(tl.maximum(one, 0.0))
    if AVERAGE >= 0:
        total += tl.load(weights + AVERAGE) * tl.sqrt(tl.maximum(mean, 0.0))
    if PEAK >= 0:
        total += tl.load(weights + PEAK) * tl.sqrt(tl.maximum(most, 0.0))
    if SPREAD_NOW >= 0:
        one = _spread_at(now, position, length, False)
        total += tl.load(weights + SPREAD_NOW) * tl.sqrt(tl.maximum(one, 0.0))
    if SPREAD_LAST >= 0:
        one = _spread_at(last, position, length, False)
        total += tl.load(weights + SPREAD_LAST) * tl.sqrt(tl.maximum(one, 0.0))
    if SPREAD_AVERAGE >= 0:
        one = mean
        fade = 1.0
        for step in tl.static_range(1, 9):
            fade = fade * 0.8
            left = _mass_at(now, position - step, 0, length, False)
            if not FIRST:
                old = _mass_at(average, position - step, 0, size, CODES)
                left = left + AVERAGE_DECAY * (old - left)
            one = tl.maximum(one, left * fade)
        total += tl.load(weights + SPREAD_AVERAGE) * tl.sqrt(tl.maximum(one, 0.0))
    if LEFT_1 >= 0:
        one = _mass_at(now, position - 1, 0, length, False)
        total += tl.load(weights + LEFT_1) * tl.sqrt(tl.maximum(one, 0.0))
    if LEFT_2 >= 0:
        one = _mass_at(now, position - 2, 0, length, False)
        total += tl.load(weights + LEFT_2) * tl.sqrt(tl.maximum(one, 0.0))
    if LEFT_3 >= 0:
        one = _mass_at(now, position - 3, 0, length, False)
        total += tl.load(weights + LEFT_3) * tl.sqrt(tl.maximum(one, 0.0))
    if HAS_MATCHES and MATCH >= 0:
        one = tl.load(matches + r * stride_mr + position, mask=inside, other=0.0)
        total += tl.load(weights + MATCH) * tl.sqrt(tl.maximum(one, 0.0))
    if CONSTANT >= 0:
        total += tl.load(weights + CONSTANT) * tl.sqrt(tl.full([BLOCK], CONSTANT_MASS, tl.float32))
    total = tl.maximum(total, 0.0)
    own = pair.to(tl.int64) * size + position
    tl.store(mass + own, total * total, mask=inside)
    if CODES:
        tl.store(new_average + own, _coded(mean), mask=inside)
        tl.store(new_peak + own, _coded(most), mask=inside)
    else:
        tl.store(new_average + own, mean, mask=inside)
        tl.store(new_peak + own, most, mask=inside)
