"""What every (k, s) would give now: expected tokens over expected seconds."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.decoding.cost_gate.position_acceptance import PositionAcceptance, mean_tokens
from pillarattn.decoding.cost_gate.round_costs import RoundCosts

# Rejections of a share that was not tried fall by this power of the shares' ratio.
SHARE_POWER = 0.3


@dataclass(frozen=True)
class Prospect:
    """What a setting would give.

    Attributes:
        k, s: the setting.
        rate: tokens a second, of one sequence.
        hoped_rate: the same with a hopeful view of acceptance.
        best_rate: the same if every draft were accepted.
        seconds: a round's.
        tokens: a round's, expected.
    """

    k: int
    s: float
    rate: float
    hoped_rate: float
    best_rate: float
    seconds: float
    tokens: float


class Outlook:
    """Costs and acceptance so far, and what they promise for settings that were not tried.

    Args:
        ks: drafts a round to compare, each >= 1.
        ss: shares to compare.
        min_budget: keys that drafts may always read: below it, shares are all alike.
    """

    def __init__(self, ks: tuple[int, ...], ss: tuple[float, ...], min_budget: int) -> None:
        self.ks = ks
        self.ss = ss
        self.min_budget = min_budget
        self.costs = RoundCosts(min_budget)
        self._acceptance: dict[float, PositionAcceptance] = {}

    def add_acceptance(self, k: int, s: float, accepted: list[int]) -> None:
        """Count the acceptance of a round."""
        self._acceptance.setdefault(s, PositionAcceptance()).observe(k, accepted)

    @property
    def rounds(self) -> int:
        """Rounds that drafted."""
        return sum(seen.rounds for seen in self._acceptance.values())

    def shares(self, length: int) -> tuple[float, ...]:
        """Return the shares that differ at this context: all above the floor, and one below."""
        above = [s for s in self.ss if s * length > self.min_budget]
        below = [s for s in self.ss if s * length <= self.min_budget]
        return (*below[-1:], *above)

    def prospects(self, length: int) -> list[Prospect]:
        """Return what each setting would give at a context of `length` tokens."""
        found = []
        rest = {k: self.costs.rest_seconds(k, length) for k in self.ks}
        most = max(self.ks)
        for s in self.shares(length):
            draft = self.costs.draft_seconds(s, length)
            likely = mean_tokens(self._chances(s, most, 0.0))
            hoped = mean_tokens(self._chances(s, most, 1.0))
            for k in self.ks:
                seconds = max(k * draft + rest[k], 1e-9)
                found.append(
                    Prospect(
                        k,
                        s,
                        rate=likely[k] / seconds,
                        hoped_rate=hoped[k] / seconds,
                        best_rate=(k + 1) / seconds,
                        seconds=seconds,
                        tokens=likely[k],
                    )
                )
        return found

    def plain_rate(self, length: int) -> float:
        """Return the tokens a second of plain decoding, of one sequence."""
        return 1.0 / max(self.costs.plain.at(length), 1e-9)

    def _chances(self, s: float, k: int, optimism: float) -> list[float]:
        """Return the chances of a share, which start from those of its best-known neighbour."""
        own = self._acceptance.get(s) or PositionAcceptance()
        tried = [(share, seen) for share, seen in self._acceptance.items() if share != s]
        if not tried or own.rounds >= 50:
            return own.chances(k, optimism=optimism)
        share, seen = min(tried, key=lambda pair: abs(pair[0] / s - s / pair[0]))
        base = seen.chances(k)
        factor = (share / s) ** SHARE_POWER
        return own.chances(
            k, prior=lambda j: max(0.0, 1.0 - (1.0 - base[j]) * factor), optimism=optimism
        )
