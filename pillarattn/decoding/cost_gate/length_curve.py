"""Seconds of one kind of work as a function of the context, from noisy measurements."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

# Measurements that the level is the median of.
WINDOW = 15
# Growth of the context after which the level so far is remembered, to tell the slope from.
STEP = 1.1
ANCHORS = 8
# Measurements that an anchor needs: a median of fewer can be an outlier.
ENOUGH = 3

Number = TypeVar("Number", int, float)


class LengthCurve:
    """A level that follows the newest measurements, and a slope for lengths not measured yet.

    seconds(L) = gemm + attention * L: both parts are >= 0, so that the slope lies between 0 and
    seconds / L. The level is a median (the lower one of an even number), so that a single stall, or
    the first pass of a kind, which compiles and allocates, does not count.

    Attributes:
        count: measurements so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._anchors: deque[tuple[int, float]] = deque(maxlen=ANCHORS)
        self._next_anchor = 0
        # Level and slope, until the next measurement: a gate asks for them many times.
        self._known: tuple[int, float, float | None] | None = None

    def add(self, length: int, seconds: float) -> None:
        """Take a measurement at a context of `length` tokens."""
        self.count += 1
        self._known = None
        self._recent.append((length, seconds))
        if length >= self._next_anchor and len(self._recent) >= ENOUGH:
            self._anchors.append((_median([n for n, _ in self._recent]), self._level()))
            self._next_anchor = int(length * STEP) + 1

    def at(self, length: int, slope: float = 0.0) -> float:
        """Return the seconds expected at `length`.

        Args:
            length: tokens of context.
            slope: seconds a token, to use where there is no slope of its own.

        Raises:
            ValueError: nothing was measured yet.
        """
        here, level, own = self._line()
        limit = level / max(here, 1)
        grown = level + min(max(slope if own is None else own, 0.0), limit) * (length - here)
        return max(grown, level * 0.1)

    @property
    def latest(self) -> tuple[int, float]:
        """Where the newest measurements were made, and their level."""
        here, level, _ = self._line()
        return here, level

    @property
    def slope(self) -> float:
        """Seconds a token; 0 where all measurements were made at about one length."""
        here, level, own = self._line()
        return min(max(own or 0.0, 0.0), level / max(here, 1))

    @property
    def last_length(self) -> int:
        """Where it was measured last, 0 if nowhere."""
        return self._recent[-1][0] if self._recent else 0

    def _line(self) -> tuple[int, float, float | None]:
        if not self._recent:
            raise ValueError("nothing was measured yet; add() comes first")
        if self._known is None:
            here, level = _median([n for n, _ in self._recent]), self._level()
            self._known = here, level, self._fitted(here, level)
        return self._known

    def _level(self) -> float:
        return _median([seconds for _, seconds in self._recent])

    def _fitted(self, here: int, level: float) -> float | None:
        """Return seconds a token by least squares over the anchors and the present level."""
        points = [*self._anchors, (here, level)]
        mean_x = sum(n for n, _ in points) / len(points)
        mean_y = sum(t for _, t in points) / len(points)
        spread = sum((n - mean_x) ** 2 for n, _ in points)
        if spread <= (0.03 * mean_x) ** 2:
            return None
        return sum((n - mean_x) * (t - mean_y) for n, t in points) / spread


def _median(values: list[Number]) -> Number:
    return sorted(values)[(len(values) - 1) // 2]
