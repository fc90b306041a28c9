"""The work list of a launch: which stretch of which reading list each item covers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.kernels.mixed_attention.tiles import MixedTiles


@dataclass(frozen=True)
class WorkList:
    """Items, ordered by request, KV head, split and block of rows; nothing of it is on the host.

    Attributes:
        starts: `[B * Hkv + 1]` int32, each pair's first item; the last is their number.
        splits: `[B * Hkv]` int32, splits of each pair's reading list, 1 at least.
        owners: `[T]` int32, the request of each packed row; -1 past the last one.
    """

    starts: Tensor
    splits: Tensor
    owners: Tensor


def make_work_list(
    rows: int,
    *,
    row_starts: Tensor,
    lengths: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    group: int,
    tiles: MixedTiles,
) -> WorkList:
    """Divide the reading lists into items of `tiles.split` places; no wait for the device.

    Args:
        rows: T, packed rows.
        group: query heads of a KV head.
        others: as `kernels.mixed_attention`.
    """
    owned = row_starts.diff().unsqueeze(-1)
    whole, tail = lengths.unsqueeze(-1), (lengths - tail_start).clamp_min(0).unsqueeze(-1)
    places = torch.where(counts < 0, whole, counts + tail)
    splits = (-(-places // tiles.split)).clamp_min(1)
    packed = owned * group
    blocks = torch.where(
        packed <= tiles.few_rows, packed.clamp_max(1), -(-packed // tiles.block_rows)
    )
    items = (splits * blocks).flatten()
    starts = torch.nn.functional.pad(items.cumsum(0), (1, 0)).to(torch.int32)
    line = torch.arange(rows, device=lengths.device, dtype=row_starts.dtype)
    owners = torch.searchsorted(row_starts, line, right=True) - 1
    owners = owners.masked_fill(line >= row_starts[-1], -1)
    return WorkList(starts, splits.flatten().to(torch.int32), owners.to(torch.int32))
