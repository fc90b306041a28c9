"""Room of step buffers: whatever grows with the longest request grows when its blocks do."""

from __future__ import annotations

import pytest

from pillarattn.engine.step_buffers import Sizes

BLOCK = 16


@pytest.mark.parametrize("share", [0.02, 0.05, 0.5])
def test_the_width_of_selections_never_grows_without_the_blocks(share):
    """A growth of its own would cost all recordings once more."""
    sizes, growths = Sizes(), 0
    for length in range(2000, 12000, 3):
        width = int(share * length)
        needed = Sizes(rows=8, seats=1, pages=-(-length // BLOCK), width=width)
        grown = sizes.grown(needed)
        if grown != sizes:
            assert grown.pages > sizes.pages, f"at {length} tokens, for {width} keys"
            sizes, growths = grown.lasting(width, length, BLOCK), growths + 1
        # What the blocks can hold, or a quarter more than is needed, rounded up.
        most = min(sizes.pages * BLOCK, length * 5 / 4) * share
        assert width <= sizes.width <= most * 9 / 8 + 64
    assert growths > 5
