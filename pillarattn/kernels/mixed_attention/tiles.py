"""Sizes of a launch of mixed attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import padded

# More than run at once: those that wait take up what the items' lengths leave uneven.
PROGRAMS = 8
# Keys and values of narrow heads, up to this, come faster by many small programs.
NARROW = 64


@dataclass(frozen=True)
class MixedTiles:
    """Sizes of one launch.

    Attributes:
        few_rows: packed rows (query rows times group) of a block where a request has no more.
        block_rows: packed rows of a block where it has.
        block_keys: keys a step.
        split: places of a reading list that one item covers, a multiple of `block_keys`. Splits
            begin at its multiples whatever else is in the batch.
        programs: programs that walk the work list; None is `PROGRAMS` for each multiprocessor.
        warps, stages: per program, and depth of the load pipeline.
        scored_keys, scored_stages: the same of requests whose rows are scored; None: no others.
            A step then takes room for its weights, beside the keys on their way.
    """

    few_rows: int = 16
    block_rows: int = 64
    block_keys: int = 32
    split: int = 2048
    programs: int | None = None
    warps: int = 4
    stages: int = 3
    scored_keys: int | None = None
    scored_stages: int | None = None

    def taken_rows(self, group: int) -> int:
        """Return the packed rows that a block takes: it cuts no query row's group if it can."""
        return self.block_rows // group * group or self.block_rows


def default_tiles(query: Tensor, key_pool: Tensor, value_pool: Tensor) -> MixedTiles:
    """Return tiles whose steps in flight fit the shared memory of a Hopper GPU."""
    if query.dtype == torch.float32:
        # fp32 products run without matrix units: large tiles only take registers.
        group = query.shape[1] // key_pool.shape[1]
        return MixedTiles(block_rows=min(padded(group), 64), block_keys=16, stages=2)
    widest = max(padded(key_pool.shape[2]), padded(value_pool.shape[2]))
    if widest <= NARROW:
        # One in nine requests of the unified schedule verifies nine rows; of up to three heads a
        # KV head, 32 packed rows hold them.
        group = query.shape[1] // key_pool.shape[1]
        rows = 32 if group <= 3 else 64
        return MixedTiles(block_rows=rows, block_keys=64, split=512, warps=2, stages=3)
    step = widest * key_pool.element_size() * 2
    # Two programs share a multiprocessor's 227 KB; queries take their part. Fewer stages than
    # three overlap nothing: the next keys are asked for when the last ones have been used.
    for keys, stages in ((64, 3), (32, 3)):
        if step * keys * stages <= 96 * 1024:
            # As much on its way in smaller steps, which leave room for scores: with more shared
            # memory one program alone would fit a multiprocessor.
            return MixedTiles(
                block_keys=keys, stages=stages, scored_keys=keys // 2, scored_stages=2 * stages - 1
            )
    return MixedTiles(block_keys=16, stages=2)


def programs_of(tiles: MixedTiles, device: torch.device) -> int:
    """Return how many programs a launch has."""
    if tiles.programs is not None:
        return tiles.programs
    if device.type != "cuda":
        return 4
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
