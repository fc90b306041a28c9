"""The items of a work list in plain PyTorch: sizes, a stable sort, and searches in their sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pillarattn.kernels.mixed_attention.tiles import MixedTiles


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
    """Return `items`, `starts`, `splits` and `owners` of `make_work_list`."""
    batch, kv_heads = counts.shape
    owned = row_starts.diff().unsqueeze(-1)
    whole, tail = lengths.unsqueeze(-1), (lengths - tail_start).clamp_min(0).unsqueeze(-1)
    places = torch.where(counts < 0, whole, counts + tail)
    splits = (-(-places // tiles.split)).clamp(1, most)
    packed = owned * group
    taken = tiles.taken_rows(group)
    blocks = torch.where(packed <= tiles.few_rows, packed.clamp_max(1), -(-packed // taken))
    sizes = (splits * blocks).flatten()
    # Short keys: a radix sort takes a pass over them for each few bits.
    longest = places.clamp_max(longest_key(tiles)).to(torch.int16)
    order = longest.flatten().argsort(descending=True, stable=True)
    ends = sizes[order].cumsum(0)
    starts = torch.empty(batch * kv_heads + 1, dtype=torch.int32, device=lengths.device)
    starts[order] = (ends - sizes[order]).to(torch.int32)
    starts[-1:] = ends[-1:]
    room = room_for(rows, batch, kv_heads, group=group, tiles=tiles, most=most)
    numbers = torch.arange(room, device=lengths.device)
    items = order[torch.searchsorted(ends, numbers, right=True).clamp_max_(len(order) - 1)]
    line = torch.arange(rows, device=lengths.device, dtype=row_starts.dtype)
    owners = torch.searchsorted(row_starts, line, right=True) - 1
    owners = owners.masked_fill(line >= row_starts[-1], -1)
    return (
        items.to(torch.int32),
        starts,
        splits.flatten().to(torch.int32),
        owners.to(torch.int32),
    )


def longest_key(tiles: MixedTiles) -> int:
    """Return the places from which on pairs count as equally long: those of a split, in 15 bits."""
    return min(tiles.split, 2**15 - 1)


def room_for(
    rows: int, batch: int, kv_heads: int, *, group: int, tiles: MixedTiles, most: int
) -> int:
    """Return how many items the shapes allow."""
    return kv_heads * most * (batch + rows * group // tiles.taken_rows(group))
