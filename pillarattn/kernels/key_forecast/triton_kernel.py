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
def _put(tile, line, mass, PLACE: tl.constexpr):
    """Write the square roots of `mass` `[N]` into row PLACE of `tile` `[16, N]`."""
    return tl.where(line[:, None] == PLACE, tl.sqrt(tl.maximum(mass, 0.0))[None, :], tile)


@triton.jit
def moments_kernel(
    now, last, average, peak, matches, target, sums,
    stride_sr, stride_sh, stride_mr, stride_tr, stride_th,
    heads, size, span, splits,
    CODES: tl.constexpr, BLOCK: tl.constexpr,
    NOW: tl.constexpr, LAST: tl.constexpr, AVERAGE: tl.constexpr, PEAK: tl.constexpr,
    SPREAD_NOW: tl.constexpr, SPREAD_LAST: tl.constexpr, SPREAD_AVERAGE: tl.constexpr,
    LEFT_1: tl.constexpr, LEFT_2: tl.constexpr, LEFT_3: tl.constexpr,
    MATCH: tl.constexpr, CONSTANT: tl.constexpr, COUNT: tl.constexpr,
    HAS_MATCHES: tl.constexpr, CONSTANT_MASS: tl.constexpr,
):  # fmt: skip
    """Sum `y f [f, y]'` over one stretch of one head's keys; the target is row COUNT of the tile.

    Strides of the record are those of `now`: the four are laid out alike.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    r = (pair // heads).to(tl.int64)
    h = (pair % heads).to(tl.int64)
    place = r * stride_sr + h * stride_sh
    now += place
    last += place
    average += place
    peak += place
    target += r * stride_tr + h * stride_th
    line = tl.arange(0, 16)
    acc = tl.zeros([16, 16], tl.float32)
    for start in range(split * span, tl.minimum(split * span + span, size), BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < size
        y = tl.load(target + position, mask=inside, other=0.0)
        tile = tl.where(line[:, None] == COUNT, y[None, :], tl.zeros([16, BLOCK], tl.float32))
        if NOW >= 0:
            tile = _put(tile, line, _mass_at(now, position, 0, size, CODES), NOW)
        if LAST >= 0:
            tile = _put(tile, line, _mass_at(last, position, 0, size, CODES), LAST)
        if AVERAGE >= 0:
            tile = _put(tile, line, _mass_at(average, position, 0, size, CODES), AVERAGE)
        if PEAK >= 0:
            tile = _put(tile, line, _mass_at(peak, position, 0, size, CODES), PEAK)
        if SPREAD_NOW >= 0:
            tile = _put(tile, line, _spread_at(now, position, size, CODES), SPREAD_NOW)
        if SPREAD_LAST >= 0:
            tile = _put(tile, line, _spread_at(last, position, size, CODES), SPREAD_LAST)
        if SPREAD_AVERAGE >= 0:
            tile = _put(tile, line, _spread_at(average, position, size, CODES), SPREAD_AVERAGE)
        if LEFT_1 >= 0:
            tile = _put(tile, line, _mass_at(now, position - 1, 0, size, CODES), LEFT_1)
        if LEFT_2 >= 0:
            tile = _put(tile, line, _mass_at(now, position - 2, 0, size, CODES), LEFT_2)
        if LEFT_3 >= 0:
            tile = _put(tile, line, _mass_at(now, position - 3, 0, size, CODES), LEFT_3)
        if HAS_MATCHES and MATCH >= 0:
            found = tl.load(matches + r * stride_mr + position, mask=inside, other=0.0)
            tile = _put(tile, line, found, MATCH)
        if CONSTANT >= 0:
            tile = _put(tile, line, tl.where(inside, CONSTANT_MASS, 0.0), CONSTANT)
        acc = tl.dot(tile * y[None, :], tl.trans(tile), acc, input_precision="ieee")
    column = tl.arange(0, 16)
    out = sums + (pair.to(tl.int64) * splits + split) * 256
    tl.store(out + line[:, None] * 16 + column[None, :], acc)


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
