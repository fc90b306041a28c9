"""Sizes of a launch of verify attention: tiles, and where its splits end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import padded, power_of_two

# Programs that a large GPU runs at once: 132 multiprocessors, two programs on each.
WAVE = 264
MIN_SPLIT = 512
# Strict mode: one boundary for every shape, so that a row never depends on what runs beside it.
STRICT_SPLIT = 1024


@dataclass(frozen=True)
class VerifyTiles:
    """Sizes of one launch.

    Attributes:
        block_rows: packed query rows of a program.
        block_keys: keys per step.
        split: keys per program, counted from position 0; None: from the shapes.
        warps: warps per program.
        stages: depth of the load pipeline.
        branch: whether a step tests that it needs a mask, instead of always masking.
    """

    block_rows: int = 64
    block_keys: int = 64
    split: int | None = None
    warps: int = 4
    stages: int = 3
    branch: bool = False


def default_tiles(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    *,
    group: int,
    strict: bool,
    one_block: bool = False,
) -> VerifyTiles:
    """Return the tiles for these shapes: three stages of keys and values in 96 KB.

    Few rows take 64 too: smaller tiles read no faster, and more of their programs run at once than
    divide the work evenly. `one_block` puts all packed rows in one block, as pooled scores need;
    these are short of time between loads, so that a mask in every step shows.
    """
    widths = [keys.shape[3]] + ([] if values is None else [values.shape[3]])
    row_bytes = sum(padded(width) for width in widths) * query.element_size()
    rows = query.shape[2] * group
    if query.dtype == torch.float32:
        # fp32 products run without matrix units: large tiles only take registers.
        block_rows = max(16, power_of_two(rows)) if one_block else 16
        return VerifyTiles(block_rows, 16, STRICT_SPLIT if strict else None, stages=2)
    block_keys = 64
    while block_keys > 16 and block_keys * row_bytes > 32768:
        block_keys //= 2
    if strict:
        return VerifyTiles(64, block_keys, STRICT_SPLIT)
    block_rows = 64 if rows <= 64 else 128
    return VerifyTiles(block_rows, block_keys, warps=8 if block_rows > 64 else 4, branch=one_block)


def split_of(programs: int, size: int, *, alone: bool = False) -> int:
    """Return how many keys one program reads, for `programs` blocks of rows over `size` keys.

    The fewest splits that keep nine tenths of the chip busy; splits end at multiples of 512.
    `alone`: one program on each multiprocessor is enough to read at full speed.
    """
    chosen = size
    for splits in range(1, 65):
        split = -(-size // splits)
        split = -(-split // MIN_SPLIT) * MIN_SPLIT
        total = programs * -(-size // split)
        waves = -(-total // WAVE)
        chosen = split
        if alone and 0.45 * WAVE <= total <= WAVE // 2:
            break
        if total >= 0.9 * waves * WAVE or split == MIN_SPLIT or total >= 8 * WAVE:
            break
    return chosen
