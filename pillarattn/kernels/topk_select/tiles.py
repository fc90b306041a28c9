"""Sizes of a launch of Top-K selection."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.kernels.block_sizes import power_of_two


@dataclass(frozen=True)
class SelectTiles:
    """Sizes of one launch.

    Attributes:
        columns: scores per step, and candidates that a row may have.
        warps: warps per program.
        stages: depth of the load pipeline.
        registers: most registers a thread may take, so that more programs run at once; None leaves
            that to the compiler.
    """

    columns: int = 2048
    warps: int = 4
    stages: int = 1
    registers: int | None = None


def default_tiles(size: int, capacity: int, most: int = 0) -> SelectTiles:
    """Return the tiles for rows of `size` scores of which up to `capacity` are kept.

    With `most`, all rows of which up to so many are kept have the same, however long they are.
    A step has twice the kept keys, so that the bound is close; short ones share a size, each of
    which is a kernel to compile. Registers are limited so that seven programs of 4 warps, or three
    of 8, run at once on a multiprocessor.
    """
    columns = min(max(power_of_two(2 * max(capacity, most)), 2048), 16384)
    if not most:
        columns = max(64, min(columns, power_of_two(size)))
    warps = max(4, min(columns // 512, 16))
    return SelectTiles(columns, warps, registers={4: 72, 8: 80}.get(warps))
