"""The items of a work list in Triton: pairs find their places without a sort (README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two
from pillarattn.kernels.work_items.reference import longest_key, room_for

if TYPE_CHECKING:
    from pillarattn.kernels.mixed_attention.tiles import MixedTiles

# Pairs that a program reads at once; fewer than the least are no faster.
LEAST_LANES, MOST_LANES = 128, 1024
# Items, or owners of rows, that it writes at once.
WIDE = 512

# Sizes and alignments change from pass to pass: none of them makes another kernel.
_SIZES = ("pairs", "most", "room", "all_rows")
_POINTERS = ("row_starts", "lengths", "tail_start", "counts")


@triton.jit
def _sizes_of(
    pair, inside, row_starts, lengths, tail_start, counts, most,
    G: tl.constexpr, HEADS: tl.constexpr, FEW_M: tl.constexpr, TAKEN_M: tl.constexpr,
    SPLIT: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """Return first row, rows, key, splits and items of pairs; those outside have no item."""
    b = pair // HEADS
    first = tl.load(row_starts + b, mask=inside, other=0).to(tl.int32)
    rows = tl.load(row_starts + b + 1, mask=inside, other=0).to(tl.int32) - first
    length = tl.load(lengths + b, mask=inside, other=0).to(tl.int32)
    tail = tl.load(tail_start + b, mask=inside, other=0).to(tl.int32)
    count = tl.load(counts + pair, mask=inside, other=0).to(tl.int32)
    places = tl.where(count < 0, length, count + tl.maximum(length - tail, 0))
    splits = tl.minimum(tl.maximum((places + SPLIT - 1) // SPLIT, 1), most)
    packed = rows * G
    blocks = tl.where(
        packed <= FEW_M, tl.minimum(packed, 1), (packed + TAKEN_M - 1) // TAKEN_M
    )  # fmt: skip
    return first, rows, tl.minimum(places, LONGEST), splits, splits * blocks


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def items_kernel(
    row_starts, lengths, tail_start, counts, items, starts, splits, owners,
    pairs, most, room, all_rows,
    G: tl.constexpr, HEADS: tl.constexpr, FEW_M: tl.constexpr, TAKEN_M: tl.constexpr,
    SPLIT: tl.constexpr, LONGEST: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write what one pair has; the first program also the total, and the rows of nobody."""
    own = tl.program_id(0)
    first, rows, key, pieces, size = _sizes_of(
        own, own < pairs, row_starts, lengths, tail_start, counts, most,
        G, HEADS, FEW_M, TAKEN_M, SPLIT, LONGEST,
    )  # fmt: skip
    before = tl.zeros([LANES], tl.int32)
    total = tl.zeros([LANES], tl.int32)
    for start in range(0, pairs, LANES):
        pair = start + tl.arange(0, LANES)
        _, _, other, _, theirs = _sizes_of(
            pair, pair < pairs, row_starts, lengths, tail_start, counts, most,
            G, HEADS, FEW_M, TAKEN_M, SPLIT, LONGEST,
        )  # fmt: skip
        is_before = (other > key) | ((other == key) & (pair < own))
        before += tl.where(is_before, theirs, 0)
        total += theirs
    place = tl.sum(before, 0)
    tl.store(starts + own, place, mask=own < pairs)
    tl.store(splits + own, pieces, mask=own < pairs)
    lane = tl.arange(0, WIDE)
    for at in range(0, size, WIDE):
        item = at + lane
        # Rows beyond T, which nobody may give, would have more items than there is room for.
        tl.store(items + place + item, own + item * 0, mask=(item < size) & (place + item < room))
    if own % HEADS == 0:
        for at in range(0, rows, WIDE):
            row = at + lane
            tl.store(
                owners + first + row,
                own // HEADS + row * 0,
                mask=(row < rows) & (first + row < all_rows),
            )
    if own == 0:
        tl.store(starts + pairs, tl.sum(total, 0))
        end = tl.load(row_starts + pairs // HEADS).to(tl.int32)
        for at in range(end, all_rows, WIDE):
            row = at + lane
            tl.store(owners + row, row * 0 - 1, mask=row < all_rows)


def work_items(
    rows: int,
    *,
    row_starts: Tensor,
    lengths: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    group: int,
    tiles: MixedTiles,
    most: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `reference.work_items`; of `items`, what lies past the last one is not written."""
    batch, kv_heads = counts.shape
    pairs, device = batch * kv_heads, lengths.device
    room = room_for(rows, batch, kv_heads, group=group, tiles=tiles, most=most)
    items, starts, splits, owners = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (room, pairs + 1, pairs, rows)
    )
    with torch.cuda.device_of(lengths):
        items_kernel[(max(pairs, 1),)](
            *(t.contiguous() for t in (row_starts, lengths, tail_start, counts)),
            items, starts, splits, owners, pairs, most, room, rows,
            G=group, HEADS=kv_heads, FEW_M=tiles.few_rows, TAKEN_M=tiles.taken_rows(group),
            SPLIT=tiles.split, LONGEST=longest_key(tiles),
            LANES=min(max(power_of_two(pairs), LEAST_LANES), MOST_LANES), WIDE=WIDE,
        )  # fmt: skip
    return items, starts, splits, owners
