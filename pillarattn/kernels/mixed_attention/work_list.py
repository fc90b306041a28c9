"""The work list of a launch: which stretch of which reading list each item covers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.mixed_attention.tiles import MixedTiles
from pillarattn.kernels.work_items import reference

register("work_items", "reference", reference.work_items)
register("work_items", "triton", "pillarattn.kernels.work_items.triton_kernel:work_items")


@dataclass(frozen=True)
class WorkList:
    """Items by pair (request and KV head), split and block of rows; nothing of it is on the host.

    Pairs with the longest items come first: what is left for the end is short.

    Attributes:
        tiles: that it was made for.
        items: int32, the pair of each item; as many as the shapes allow, undefined past the last.
        starts: `[B * Hkv + 1]` int32, each pair's first item; the last is their number.
        splits: `[B * Hkv]` int32, splits of each pair's reading list, 1 at least.
        owners: `[T]` int32, the request of each packed row; -1 past the last one.
    """

    tiles: MixedTiles
    items: Tensor
    starts: Tensor
    splits: Tensor
    owners: Tensor


def most_splits(table: Tensor, block_size: int, tiles: MixedTiles) -> int:
    """Return the splits of the longest list that a block table `[B, P]` allows.

    The lengths themselves are on the device. A selection of all keys and its tail is no longer.
    """
    return max(1, -(-table.shape[1] * block_size // tiles.split))


def make_work_list(
    rows: int,
    *,
    row_starts: Tensor,
    lengths: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    group: int,
    tiles: MixedTiles,
    most: int,
    implementation: str = "auto",
) -> WorkList:
    """Divide the reading lists into items of `tiles.split` places; no wait for the device.

    Args:
        rows: T, packed rows.
        counts: as `kernels.mixed_attention`; or, for a list that several layers share, the most
            that any of them has: of a shorter list the last items are empty.
        group: query heads of a KV head.
        most: `most_splits` of the block table.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.
        others: as `kernels.mixed_attention`.
    """
    make = choose("work_items", implementation, row_starts, lengths, counts, tail_start)
    made = make(
        rows, row_starts=row_starts, lengths=lengths, counts=counts, tail_start=tail_start,
        group=group, tiles=tiles, most=most,
    )  # fmt: skip
    return WorkList(tiles, *made)


def slots_of(indices: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Return the slots of logical positions `[B, Hkv, N]` in the pool, int32.

    Undefined entries have undefined slots.
    """
    batch, heads, width = indices.shape
    flat = indices.reshape(batch, heads * width).long()
    block = (flat // block_size).clamp_(0, block_table.shape[1] - 1)
    found = block_table.gather(1, block) * block_size + (flat % block_size)
    return found.to(torch.int32).view(batch, heads, width)
