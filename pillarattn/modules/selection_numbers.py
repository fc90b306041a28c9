"""The integers of a selection by row, copied to the device once for all that ask for the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pillarattn.datatypes import RowLengths, on_device

# Tokens of context to keys kept.
Budget = Callable[[int], int]


@dataclass(frozen=True)
class ForcedTokens:
    """Tokens that every selection keeps: the first `sink` and the newest `recent`.

    The tokens that the last round emitted are always kept, and `extra` more (the paper's code
    keeps one more: reference.md 1.2).
    """

    recent: int = 16
    sink: int = 4
    extra: int = 0

    def newest(self, emitted: int) -> int:
        """Return how many newest tokens to keep after a round that emitted `emitted` tokens."""
        return max(self.recent, emitted + self.extra)

    def newest_of(self, emitted: Tensor) -> Tensor:
        """Return the same for rounds whose tokens the device alone has counted."""
        return (emitted + self.extra).clamp_min(self.recent)


@dataclass(frozen=True)
class SelectionNumbers:
    """What the rows of a batch may keep.

    Attributes:
        table: `[4, B]` int64: lengths, budgets, newest tokens to keep, and starts, the first
            position that the window leaves visible.
        widest: the most keys that a budget lets a row keep.
    """

    table: Tensor
    widest: int


class NumbersOnce:
    """Remembers the numbers of the last lengths: the layers and steps of a round share them."""

    def __init__(self) -> None:
        self._asked: tuple[RowLengths, list[int], Budget | tuple[Budget, ...]] | None = None
        self._known: dict[int | None, SelectionNumbers] = {}

    def of(
        self,
        lengths: RowLengths,
        newest: list[int],
        budget: Budget | tuple[Budget, ...],
        window: int | None,
    ) -> SelectionNumbers:
        """Return the numbers of a batch.

        Args:
            lengths: of the rows; budgets are those of what a window leaves visible.
            newest: tokens that each row keeps whatever the scores say.
            budget: tokens of context to keys kept, one for all rows or one a row; two that are
                equal give the same.
            window: positions that a query sees, or None.
        """
        asked = self._asked
        if asked is None or asked[0] is not lengths or asked[1:] != (newest, budget):
            self._asked = (lengths, newest, budget)
            self._known.clear()
        if window not in self._known:
            starts = [0 if window is None else max(0, n - window + 1) for n in lengths.host]
            visible = [n - start for n, start in zip(lengths.host, starts, strict=True)]
            own = budget if isinstance(budget, tuple) else (budget,) * len(visible)
            budgets = [keys(n) for keys, n in zip(own, visible, strict=True)]
            table = on_device([list(lengths.host), budgets, newest, starts], lengths.device)
            kept = (min(n, seen) for n, seen in zip(budgets, visible, strict=True))
            self._known[window] = SelectionNumbers(table, max(kept, default=0))
        return self._known[window]
