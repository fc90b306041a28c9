"""How likely each draft position is accepted, from few rounds and then from many."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

# Acceptance before anything is known: what selected keys give most models (reports of 6 of 8).
PRIOR = 0.8
# Trials that a prior weighs as much as.
WEIGHT = 3.0
# What a round leaves of the counts: about fifty rounds are remembered.
MEMORY = 0.98


class PositionAcceptance:
    """Chance that position j is accepted if all before it were, counted with slow forgetting.

    A position that was seldom reached is taken for as good as the one before it.

    Attributes:
        rounds: rounds counted.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self._trials: list[float] = []
        self._hits: list[float] = []

    def observe(self, k: int, accepted: Sequence[int]) -> None:
        """Count a round that was to draft k tokens: `accepted`, one number a row.

        A row that proposed fewer than k counts as rejected where it ended.
        """
        if k < 1 or not accepted:
            return
        self.rounds += 1
        self._trials = [n * MEMORY for n in self._trials]
        self._hits = [n * MEMORY for n in self._hits]
        missing = k - len(self._trials)
        self._trials += [0.0] * missing
        self._hits += [0.0] * missing
        at = [0] * (k + 1)
        for count in accepted:
            at[min(count, k)] += 1
        alive = len(accepted)
        for j in range(k):
            self._trials[j] += alive
            alive -= at[j]
            self._hits[j] += alive

    def chances(self, k: int, *, prior: Sequence[float] | None = None) -> list[float]:
        """Return the chances of positions 0..k-1.

        Args:
            k: positions.
            prior: chance of each position before anything was counted; None: the prior, and then
                what the position before has.
        """
        found: list[float] = []
        before = PRIOR
        for j in range(k):
            trials, hits = (self._trials[j], self._hits[j]) if j < len(self._trials) else (0.0, 0.0)
            start = before if prior is None else prior[j]
            before = min(max((hits + WEIGHT * start) / (trials + WEIGHT), 0.0), 1.0)
            found.append(before)
        return found

    def deviations(self, chances: Sequence[float]) -> list[float]:
        """Return the standard deviations of `chances` of its own."""
        counted = [*self._trials[: len(chances)], *[0.0] * (len(chances) - len(self._trials))]
        return [
            sqrt(max(mean * (1 - mean), 0.01) / (trials + WEIGHT))
            for mean, trials in zip(chances, counted, strict=True)
        ]


def mean_tokens(chances: Sequence[float]) -> list[float]:
    """Return the tokens that a round of k drafts emits on average, for k = 0..len(chances)."""
    total, reach = 1.0, 1.0
    found = [total]
    for chance in chances:
        reach *= chance
        total += reach
        found.append(total)
    return found
