"""Top-K selection in Triton: one program a row and KV head, no sort, no host read.

Each program finds a lower bound of its threshold from column maxima, keeps the few keys above it,
and settles the exact threshold among those (README.md: why this is exact).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import stretched
from pillarattn.kernels.topk_select.tiles import SelectTiles, default_tiles


@triton.jit
def _ordered(floats, SHIFT: tl.constexpr):
    """Turn fp32 into int32 in the same order: NaN lowest but one, -0.0 equal to 0.0."""
    bits = floats.to(tl.int32, bitcast=True)
    magnitude = bits & 2147483647
    key = tl.where(bits < 0, ~magnitude, magnitude)
    key = tl.where(magnitude == 0, 0, key) >> SHIFT
    return tl.where(magnitude > 0x7F800000, _lowest(SHIFT), key)


@triton.jit
def _lowest(SHIFT: tl.constexpr):
    """Return the key of NaN; what may not be chosen has one less."""
    return (-2147483648 >> SHIFT) + 1


@triton.jit
def _load(scores, position, base, lo, hi, bound, COLUMNS: tl.constexpr):
    """Load a tile as fp32, -inf outside lo..hi-1; only the tiles at the ends need a mask.

    The load's own mask ends at an aligned bound so that it stays 16 bytes wide.
    """
    tile = tl.load(scores + position, mask=position < bound, other=-float("inf")).to(tl.float32)
    if (base < lo) | (base + COLUMNS > hi):
        tile = tl.where((position >= lo) & (position < hi), tile, -float("inf"))
    return tile


@triton.jit
def _load_keys(scores, position, lo, hi, SHIFT: tl.constexpr):
    """Load a tile as ordered keys, below every other key outside lo..hi-1."""
    inside = (position >= lo) & (position < hi)
    tile = tl.load(scores + position, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, _ordered(tile, SHIFT), _lowest(SHIFT) - 1)


@triton.jit
def _search(keys, low, high, reached, wanted, slack):
    """Raise `low` while at least `wanted` keys are at or above it; stop at `wanted + slack`.

    `reached` keys are at or above `low`, none at or above `high`. Guesses follow the counts (keys
    are nearly evenly spaced there), and every third one halves the range, whatever the counts say.
    """
    over = wanted * 0
    step = wanted * 0
    while (reached > wanted + slack) & (high - low > 1):
        share = (reached - wanted - slack // 2).to(tl.float32) / (reached - over).to(tl.float32)
        guess = low + ((high - low).to(tl.float32) * share).to(tl.int64)
        guess = tl.where(step % 3 == 2, low + (high - low) // 2, guess)
        guess = tl.maximum(tl.minimum(guess, high - 1), low + 1)
        count = tl.sum((keys >= guess.to(tl.int32)).to(tl.int32))
        enough = count >= wanted
        low = tl.where(enough, guess, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, guess)
        over = tl.where(enough, over, count)
        step += 1
    return low, reached


@triton.jit
def _places(flags):
    """Return how many flags stand before each place of a tile, row by row, and how many in all.

    Only the totals of short rows are added up across threads.
    """
    ones = flags.to(tl.int32)
    per_row = tl.sum(ones, 1)
    before = tl.cumsum(per_row, 0) - per_row
    return before[:, None] + tl.cumsum(ones, 1) - ones, tl.sum(per_row, 0)


@triton.jit
def _select_slowly(
    scores, indices, place, begin, lo, hi, oldest, wanted, low, high,
    COLUMNS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Find the threshold in low..high-1 by reading the row again for each guess, and write."""
    reached = wanted + 1
    # Many keys that equal the bound are the usual reason to be here.
    guess = low + 1
    while (reached > wanted) & (high - low > 1):
        count = wanted * 0
        for base in range(begin, hi, COLUMNS):
            key = _load_keys(scores, base + place, lo, hi, SHIFT)
            count += tl.sum((key >= guess.to(tl.int32)).to(tl.int32))
        enough = count >= wanted
        low = tl.where(enough, guess, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, guess)
        guess = low + (high - low) // 2
    limit = low.to(tl.int32)
    above = wanted * 0
    for base in range(begin, hi, COLUMNS):
        key = _load_keys(scores, base + place, lo, hi, SHIFT)
        above += tl.sum((key > limit).to(tl.int32))
    room = wanted - above
    used = oldest
    ties = wanted * 0
    for base in range(begin, hi, COLUMNS):
        key = _load_keys(scores, base + place, lo, hi, SHIFT)
        tie = key == limit
        earlier, more = _places(tie)
        chosen = (key > limit) | (tie & (ties + earlier < room))
        slot, taken = _places(chosen)
        tl.store(indices + used + slot, base + place, mask=chosen)
        used += taken
        ties += more


# The kept keys of growing contexts: whether they are a multiple of 16 makes no other kernel.
@triton.jit(do_not_specialize=["capacity"])
def _topk_kernel(
    scores,
    lengths,
    budgets,
    recents,
    starts,
    indices,
    counts,
    scratch,
    stride_sr,
    stride_sh,
    heads,
    size,
    sink,
    capacity,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0)
    r = (row // heads).to(tl.int64)
    h = (row % heads).to(tl.int64)
    length = tl.load(lengths + r).to(tl.int32)
    start = tl.load(starts + r).to(tl.int32)
    visible = tl.maximum(length - start, 0)
    kept = tl.minimum(tl.load(budgets + r).to(tl.int64), visible.to(tl.int64)).to(tl.int32)
    kept = tl.minimum(kept, capacity)
    newest = tl.minimum(tl.load(recents + r).to(tl.int64), kept.to(tl.int64)).to(tl.int32)
    oldest = tl.minimum(kept - newest, sink)
    wanted = kept - newest - oldest
    lo = start + oldest
    hi = length - newest
    tl.store(counts + row, kept)
    indices += row.to(tl.int64) * capacity
    scratch += row.to(tl.int64) * COLUMNS
    scores += r * stride_sr + h * stride_sh

    # Forced positions: first and newest ones, or all; zeros past them.
    everything = kept == visible
    first_end = tl.where(everything, kept, oldest)
    step = tl.arange(0, 128)
    for base in range(0, first_end, 128):
        slot = base + step
        tl.store(indices + slot, start + slot, mask=slot < first_end)
    for base in range(tl.where(everything, kept, oldest + wanted), capacity, 128):
        slot = base + step
        value = tl.where(slot < kept, length - kept + slot, 0)
        tl.store(indices + slot, value, mask=slot < capacity)

    if (wanted > 0) & (kept < visible):
        # A thread holds whole rows of LANES neighbours, one 16-byte load each.
        groups = tl.arange(0, COLUMNS // LANES)
        place = groups[:, None] * LANES + tl.arange(0, LANES)[None, :]
        # Loads begin at multiples of 16, wherever the row may begin.
        begin = lo // 16 * 16
        bound = tl.minimum((hi + 15) // 16 * 16, size)
        best = tl.full([COLUMNS // LANES, LANES], -float("inf"), tl.float32)
        for base in tl.range(begin, hi, COLUMNS, num_stages=STAGES):
            tile = _load(scores, base + place, base, lo, hi, bound, COLUMNS)
            best = tl.maximum(best, tile)
        # Each column that reaches the bound holds a key that does: at least `wanted` keys do.
        maxima = _ordered(best, SHIFT)
        high = tl.max(maxima).to(tl.int64) + 1
        low = tl.min(maxima).to(tl.int64)
        low, reached = _search(maxima, low, high, wanted * 0 + COLUMNS, wanted, wanted // 16)
        floor_key = low.to(tl.int32)
        # At -inf, columns without any key count too, and NaN keys may be needed: no bound.
        # Nor is there one where more are wanted than there are columns.
        bounded = (floor_key > (~0x7F800000 >> SHIFT)) & (wanted <= COLUMNS)
        found = wanted * 0
        if bounded:
            shifted = floor_key << SHIFT
            shifted = tl.where(shifted < 0, ~shifted | -2147483648, shifted)
            floor = shifted.to(tl.float32, bitcast=True)
            for base in tl.range(begin, hi, COLUMNS, num_stages=STAGES):
                tile = _load(scores, base + place, base, lo, hi, bound, COLUMNS)
                near = tile >= floor
                slot, more = _places(near)
                if found + more <= COLUMNS:
                    tl.store(scratch + found + slot, base + place, mask=near)
                found += more
        if bounded & (found <= COLUMNS):
            tl.debug_barrier()
            usable = place < found
            position = tl.load(scratch + place, mask=usable, other=0)
            near_scores = tl.load(scores + position, mask=usable, other=0.0).to(tl.float32)
            key = tl.where(usable, _ordered(near_scores, SHIFT), _lowest(SHIFT) - 1)
            low, reached = _search(key, low, high, found, wanted, wanted * 0)
            limit = low.to(tl.int32)
            chosen = key >= limit
            if reached > wanted:
                above = key > limit
                tie = key == limit
                room = wanted - tl.sum(above.to(tl.int32))
                earlier, _ = _places(tie)
                chosen = above | (tie & (earlier < room))
            slot, _ = _places(chosen)
            tl.store(indices + oldest + slot, position, mask=chosen)
        else:
            low = tl.where(bounded, low, _lowest(SHIFT))
            # Columns of NaN alone hide behind -inf; the range must hold all keys.
            high = tl.maximum(high, low + 1)
            _select_slowly(
                scores, indices, place, begin, lo, hi, oldest, wanted, low, high, COLUMNS, SHIFT
            )


def topk_select(
    scores: Tensor,
    *,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    sink: int,
    starts: Tensor,
    capacity: int | None = None,
    most: int = 0,
    tiles: SelectTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.topk_select`; without `capacity`, reading it waits for the device."""
    rows, kv_heads, size = scores.shape
    if capacity is None:
        kept = torch.minimum(budgets.long(), (lengths - starts).long().clamp_min(0))
        capacity = int(kept.max()) if rows else 0
    indices = torch.empty(rows, kv_heads, capacity, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows, kv_heads, dtype=torch.int32, device=scores.device)
    if not capacity or not counts.numel():
        return indices, counts.zero_()
    tiles = tiles or default_tiles(size, capacity, most)
    scratch = torch.empty(counts.numel(), tiles.columns, dtype=torch.int32, device=scores.device)
    if scores.stride(2) != 1 and size > 1:
        scores = scores.contiguous()
    with torch.cuda.device_of(scores):
        _topk_kernel[(counts.numel(),)](
            scores.detach(),
            lengths.contiguous(),
            budgets.contiguous(),
            recent.contiguous(),
            starts.contiguous(),
            indices,
            counts,
            scratch,
            scores.stride(0),
            scores.stride(1),
            kv_heads,
            _readable(scores),
            sink,
            capacity,
            SHIFT=_SHIFTS[scores.dtype],
            LANES=16 // scores.element_size(),
            COLUMNS=tiles.columns,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            maxnreg=tiles.registers,
        )
    return indices, counts


def _readable(scores: Tensor) -> int:
    """Return how many scores of each row may be read: whole stretches where memory has them.

    What lies past a row's own is never chosen.
    """
    rows, heads, size = scores.shape
    wide = stretched(size)
    last = scores.storage_offset() + (rows - 1) * scores.stride(0) + (heads - 1) * scores.stride(1)
    held = scores.untyped_storage().nbytes() // scores.element_size()
    return wide if last + wide <= held else size


# Low bits of an fp32 number that are zero where it holds one of this dtype.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
