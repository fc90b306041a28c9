"""Sizes of a launch of mixed attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import padded

# More than run at once: those that wait take up what the items' lengths leave uneven.
PROGRAMS = 8
# Keys and values of narrow heads, up to this, come faster by many small programs.
NARROW = 64
# Packed rows of the largest blocks.
MOST_ROWS = 64
# Packed rows of blocks whose scores come with weights relative to the known normalisers: the
# others have no registers left for it.
MOST_BASED = 32
# Pairs of request and KV head that keep a GPU busy with long items, and rows that are few.
MANY_PAIRS, FEW_QUERIES = 256, 512


@dataclass(frozen=True)
class MixedTiles:
    """Sizes of one launch.

    Attributes:
        few_rows: packed rows (query rows times group) of a block where a request has no more.
        block_rows: packed rows of a block where it has.
        block_keys: keys a step.
        split: places of a reading list that one item covers, a multiple of `block_keys`. Splits
            begin at its multiples of a request's own list.
        programs: programs that walk the work list; None is `PROGRAMS` for each multiprocessor.
        warps, stages: per program, and depth of the load pipeline.
        scored_keys, scored_stages: the same of requests whose rows are scored; None: no others.
            A step then takes room for its weights, beside the keys on their way.
    """

    few_rows: int = 16
    block_rows: int = MOST_ROWS
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

    def rare_rows(self, group: int) -> tuple[int, int]:
        """Return size and taken rows of the smaller blocks that one may be divided into."""
        rows, most = self.taken_rows(group) // group, self.few_rows // group
        if most == 0:
            return self.block_rows, self.taken_rows(group)
        return self.few_rows, max(n for n in range(1, most + 1) if rows % n == 0) * group


def default_tiles(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    *,
    requests: int | None = None,
    most_rows: int | None = None,
) -> MixedTiles:
    """Return tiles whose steps in flight fit the shared memory of a Hopper GPU.

    Args:
        query, key_pool, value_pool: as `kernels.mixed_attention`.
        requests: B; None: many.
        most_rows: of the largest request; None: not known.
    """
    group = query.shape[1] // key_pool.shape[1]
    if query.dtype == torch.float32:
        # fp32 products run without matrix units: large tiles only take registers.
        rows = min(padded(group * (most_rows or 1)), MOST_ROWS)
        return MixedTiles(block_rows=rows, block_keys=16, stages=2)
    widest = max(padded(key_pool.shape[2]), padded(value_pool.shape[2]))
    is_narrow = widest <= NARROW
    # One block should hold a request that verifies. Of up to three heads a KV head, 32 packed rows
    # hold the nine of eight drafts.
    rows = 32 if is_narrow and group <= 3 else MOST_ROWS
    if most_rows is not None:
        rows = min(padded(most_rows * group), MOST_ROWS)
    split = _split_of(requests, query.shape[0], key_pool.shape[1], is_narrow=is_narrow)
    if is_narrow:
        return MixedTiles(block_rows=rows, block_keys=64, split=split, warps=2, stages=3)
    step = widest * key_pool.element_size() * 2
    # Two programs share a multiprocessor's 227 KB; queries take their part. Fewer stages than
    # three overlap nothing: the next keys are asked for when the last ones have been used.
    for keys in (64, 32):
        if step * keys * 3 <= 96 * 1024:
            scored = (None, None) if rows <= MOST_BASED else (keys // 2, 5)
            return MixedTiles(
                block_rows=rows, block_keys=keys, split=split, stages=3,
                # As much on its way in smaller steps, which leave room for scores: with more shared
                # memory one program alone would fit a multiprocessor.
                scored_keys=scored[0], scored_stages=scored[1],
            )  # fmt: skip
    return MixedTiles(block_rows=rows, block_keys=16, split=split, stages=2)


def strict_tiles(query: Tensor, key_pool: Tensor, value_pool: Tensor) -> MixedTiles:
    """Return tiles by which a row has the same bits in every launch.

    Blocks of one size, splits of one length and steps at the same places, whatever else is there.
    """
    tiles = default_tiles(query, key_pool, value_pool)
    return replace(tiles, few_rows=tiles.block_rows, scored_keys=None, scored_stages=None)


def _split_of(requests: int | None, rows: int, kv_heads: int, *, is_narrow: bool) -> int:
    """Return places of an item: the fewer pairs there are, the shorter, so that all are busy.

    Many rows keep long ones: room for what they leave grows with the splits.
    """
    pairs = MANY_PAIRS if requests is None or rows > FEW_QUERIES else requests * kv_heads
    sizes = (1280, 768, 512) if is_narrow else (2048, 1024, 512)
    return sizes[0 if pairs >= MANY_PAIRS else 1 if pairs >= MANY_PAIRS // 4 else 2]


def programs_of(tiles: MixedTiles, device: torch.device) -> int:
    """Return how many programs a launch has."""
    if tiles.programs is not None:
        return tiles.programs
    if device.type != "cuda":
        return 4
    return PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
