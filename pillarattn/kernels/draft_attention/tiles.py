"""Sizes of a launch of draft attention: tiles, and how a reading list is split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import padded

# Programs that keep a large GPU reading: 132 multiprocessors, about two programs on each.
WAVE = 256
# Programs that it runs at once with three stages of 32 keys.
MOST_AT_ONCE = 900
# The same with three stages of 16 keys and one warp.
MOST_SMALL_AT_ONCE = 1100
# A shorter stretch costs more in start-up than it gains in balance.
MIN_CHUNK = 128
# Longer lists are cut even where there are many: with ragged counts the longest one would decide.
MAX_CHUNK, BALANCED_CHUNK = 1024, 512
MAX_SPLITS = 64


@dataclass(frozen=True)
class DraftTiles:
    """Sizes of one launch: keys per step, keys per program (None: from the shapes), and depth."""

    block_keys: int = 64
    chunk: int | None = None
    warps: int = 4
    stages: int = 3


def default_tiles(query: Tensor, keys: Tensor, values: Tensor, *, programs: int) -> DraftTiles:
    """Return the tiles for these shapes: those with which `programs` programs run at once.

    All steps in flight take 64 KB where programs are few, 32 KB where they are many.
    """
    if programs <= WAVE:
        tiles = DraftTiles(64, warps=4, stages=3)
    elif programs <= MOST_AT_ONCE:
        tiles = DraftTiles(32, warps=2, stages=3)
    elif programs <= MOST_SMALL_AT_ONCE:
        tiles = DraftTiles(16, warps=1, stages=3)
    else:
        tiles = DraftTiles(64, warps=4, stages=2)
    row_bytes = (padded(keys.shape[3]) + padded(values.shape[3])) * query.element_size()
    block = tiles.block_keys
    while block > 16 and block * row_bytes > 32768:
        block //= 2
    if query.dtype == torch.float32:
        # fp32 products run without matrix units: large tiles only take registers.
        return DraftTiles(min(block, 16), warps=4, stages=2)
    return replace(tiles, block_keys=block)


def chunk_of(rows: int, width: int) -> int:
    """Return how many keys one program reads, for `rows` reading lists of up to `width` keys."""
    splits = min(MAX_SPLITS, max(1, -(-WAVE // max(rows, 1))))
    chunk = max(MIN_CHUNK, -(-width // splits))
    if chunk > MAX_CHUNK:
        chunk = BALANCED_CHUNK
    return -(-chunk // 64) * 64
