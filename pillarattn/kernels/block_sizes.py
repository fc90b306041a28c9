"""Sizes that Triton tiles are made of."""

from __future__ import annotations

# Numbers of a row that one thread may read at once begin at multiples of this.
STRETCH = 16


def stretched(size: int) -> int:
    """Return `size` filled up to whole stretches: what does not tell one length from the next."""
    return -(-size // STRETCH) * STRETCH


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`, 1 for sizes below 1."""
    return 1 << max(size - 1, 0).bit_length()


def padded(dim: int) -> int:
    """Return the width of a tile that holds a head of `dim`: a matrix product needs 16 at least."""
    return max(16, power_of_two(dim))
