"""What rounds cost on the model at hand: measured where they ran, interpolated elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pillarattn.decoding.cost_gate.length_curve import LengthCurve

Key = TypeVar("Key", int, float)


# How far from where it was measured a draft step's own line is trusted.
NEAR = 1.3


class RoundCosts:
    """Seconds of a plain step, of a draft step by its keys, and of the rest of a round by k.

    The rest is verification, acceptance and selection. A plain step is one row and all keys: the
    end of both lines, at k = 0 for the rest and at all keys for drafts. Where verify passes have
    more rows than their drafts need, so that rounds share a recording, all those k have one rest.

    Args:
        min_budget: keys that drafts may always read.

    Attributes:
        plain: seconds of a plain step by length.
        rounds: rounds that were measured.
    """

    def __init__(self, min_budget: int) -> None:
        self.min_budget = min_budget
        self.plain = LengthCurve()
        self._draft: dict[float, LengthCurve] = {}
        # By the drafts that there are rows for.
        self._rest: dict[int, LengthCurve] = {}
        # By k: drafts that its verify passes had rows for.
        self._rooms: dict[int, int] = {}
        self.rounds = 0

    def keys(self, s: float, length: int) -> int:
        """Return how many keys a draft reads."""
        return min(max(self.min_budget, round(s * length)), length)

    def add_plain(self, length: int, seconds: float) -> None:
        """Take the time of a plain step."""
        self.plain.add(length, seconds)

    def add_round(
        self, k: int, s: float, length: int, *, draft: float, rest: float, width: int | None = None
    ) -> None:
        """Take the times of a round: of all its draft steps, and of what followed them.

        Args:
            k, s, length: see `ObservedRound`.
            draft, rest: seconds.
            width: see `ObservedRound`.
        """
        self.rounds += 1
        room = max((width or 0) - 1, k)
        self._rooms[k] = room
        self._draft.setdefault(s, LengthCurve()).add(self.keys(s, length), draft / k)
        self._rest.setdefault(room, LengthCurve()).add(length, rest)

    def ran(self, k: int, s: float) -> bool:
        """Whether verify passes as wide as those of k were measured, and drafts of share s.

        A selection of another size may have to be compiled.
        """
        return self._room(k) in self._rest and s in self._draft

    def measured(self, k: int, s: float) -> int:
        """Return how often both parts of such a round were measured."""
        parts = (self._rest.get(self._room(k)), self._draft.get(s))
        return min(0 if part is None else part.count for part in parts)

    def draft_seconds(self, s: float, length: int) -> float:
        """Return the seconds of one draft step."""
        keys = self.keys(s, length)
        own = self._draft.get(s)
        if own is not None and own.last_length * NEAR >= keys >= own.last_length / NEAR:
            return own.at(keys)
        known = dict(curve.latest for curve in self._draft.values())
        # A draft that is no faster than plain decoding would not get slower with all keys.
        known[length] = max([self.plain.at(length), *known.values()])
        return _between(known, keys)

    def rests(self, ks: Sequence[int], length: int) -> list[float]:
        """Return the seconds of rounds of each k in `ks` without their draft steps."""
        # What was measured at one length alone grows as the best-known line does.
        most = max(self._rest.values(), key=lambda curve: curve.count, default=self.plain)
        slope = most.slope
        known = {drafts: curve.at(length, slope) for drafts, curve in self._rest.items()}
        with_plain = {0: self.plain.at(length), **known}
        rooms = map(self._room, ks)
        return [known[n] if n in known else _between(with_plain, n) for n in rooms]

    def _room(self, k: int) -> int:
        """Return the drafts that verify passes of rounds of k have rows for."""
        shared = (n for other, n in self._rooms.items() if n > other and n >= k)
        return self._rooms[k] if k in self._rooms else min(shared, default=k)

    def rest_seconds(self, k: int, length: int) -> float:
        """Return the seconds of a round of k drafts without its draft steps."""
        return self.rests((k,), length)[0]

    def round_seconds(self, k: int, s: float, length: int) -> float:
        """Return the seconds of a whole round."""
        return k * self.draft_seconds(s, length) + self.rest_seconds(k, length)


def _between(known: Mapping[Key, float], place: Key) -> float:
    """Return the value at `place` on the line through its two neighbours, never falling."""
    places = sorted(known)
    if len(places) == 1:
        return known[places[0]]
    above = next((i for i, x in enumerate(places) if x >= place), len(places) - 1)
    left, right = places[max(above - 1, 0)], places[max(above, 1)]
    slope = max((known[right] - known[left]) / (right - left), 0.0)
    base = left if place >= left else right
    return max(known[base] + slope * (place - base), 0.0)
