"""How many rows a pass that may be recorded has, so that few recordings serve all numbers."""

from __future__ import annotations

from collections.abc import Hashable

from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.patch.graph_recorder import rounded

# Rows of a pass are rounded up to a multiple of an eighth of them, and of this.
LEAST_ROWS = 8
# Up to so many rows a pass takes about what reading its weights takes.
FREE_ROWS = 256
# Rows of nobody that replays of larger recordings may compute for a number of rows, in passes of
# that number, before it is worth a recording of its own: that takes some eager passes.
PATIENCE = 16.0
# The same of whole steps, whose numbers of rows shrink by one after the other as requests end.
STEP_PATIENCE = 48.0
# How many more rows a pass and a step may have than they need: a share of these or of `FREE_ROWS`.
SPARE, STEP_SPARE = 0.25, 1.0


def bucket(rows: int) -> int:
    """Return how many rows a pass has that fits as closely as recordings go."""
    return rounded(rows, LEAST_ROWS)


class RowBuckets:
    """Chooses among the recordings that there are, before it asks for a new one.

    A number of rows without a recording replays a larger one, where at most a quarter more rows (or
    few) are needed, for whole steps as many more. Once all that it has computed for nobody is what
    a recording takes, it gets its own. Where no recording fits, the next one has some rows to spare
    for other numbers.

    Args:
        graphs: the recordings.
    """

    def __init__(self, graphs: GraphedPasses) -> None:
        self._graphs = graphs
        self._generation = -1
        # In passes, by kind; since the memory moved last, and all recordings with it.
        self._wasted: dict[Hashable, float] = {}

    def rows_for(
        self, rows: int, *rest: Hashable, generation: int, most: int, of_steps: bool = False
    ) -> int:
        """Return how many rows a pass should have.

        Args:
            rows: of its requests.
            rest: what makes up its kind beside the rows.
            generation: of the memory that passes read now.
            most: rows that it may have.
            of_steps: whether a whole step is recorded, which takes longer.
        """
        own = bucket(rows)
        kind = own, *rest
        graphs = self._graphs
        if not graphs.is_active or graphs.has_recorded(kind, generation):
            return own
        if generation != self._generation:
            self._generation = generation
            self._wasted.clear()
        weight = max(rows, FREE_ROWS)
        wasted = self._wasted.get(kind, 0.0)
        if wasted >= (STEP_PATIENCE if of_steps else PATIENCE):
            return own
        furthest = min(rows + int((STEP_SPARE if of_steps else SPARE) * weight), most)
        for wider in range(own + LEAST_ROWS, furthest + 1, LEAST_ROWS):
            if graphs.has_recorded((wider, *rest), generation):
                self._wasted[kind] = wasted + (wider - own) / weight
                return wider
        return max(own, min(_spacious(rows), most))


def _spacious(rows: int) -> int:
    """Return a number of rows in steps of a quarter of a power of two."""
    return rounded(rows, max(LEAST_ROWS, (1 << max(rows.bit_length() - 1, 0)) // 4))
