"""What every (k, s) would give now: expected tokens over expected seconds."""

from __future__ import annotations

from typing import NamedTuple

from pillarattn.decoding.cost_gate.position_acceptance import PositionAcceptance, mean_tokens
from pillarattn.decoding.cost_gate.round_costs import RoundCosts
from pillarattn.decoding.cost_gate.trials import Trials

# Rejections of a share that was not tried fall by this power of the shares' ratio.
SHARE_POWER = 0.3
DOUBT = 0.5


class Prospect(NamedTuple):
    """What a setting would give.

    Attributes:
        k, s: the setting.
        rate: tokens a second, of one sequence.
        hoped_rate: the same with a hopeful view of acceptance: a standard deviation higher.
        doubted_rate: the same with a doubtful view: `DOUBT` of them lower.
        best_rate: the same if every draft were accepted.
        seconds: a round's.
        tokens: a round's, expected.
    """

    k: int
    s: float
    rate: float
    hoped_rate: float
    doubted_rate: float
    best_rate: float
    seconds: float
    tokens: float


class Outlook:
    """Costs and acceptance so far, and what they promise for settings that were not tried.

    Args:
        ks: drafts a round to compare, each >= 1.
        ss: shares to compare.
        min_budget: keys that drafts may always read: below it, shares are all alike.

    Attributes:
        costs: seconds of rounds.
        settles: whether first passes were seen to be slower than later ones, as where they are
            recorded.
        ran_shares: shares that rounds drafted with.
        trials: what trials have cost, and when the next one is due.
    """

    def __init__(self, ks: tuple[int, ...], ss: tuple[float, ...], min_budget: int) -> None:
        self.ks = ks
        self.ss = ss
        self.min_budget = min_budget
        self.costs = RoundCosts(min_budget)
        self.settles = False
        self.ran_shares: set[float] = set()
        self.trials = Trials()
        self._acceptance: dict[float, PositionAcceptance] = {}

    def add_acceptance(self, k: int, s: float, accepted: list[int]) -> None:
        """Count the acceptance of a round."""
        self._acceptance.setdefault(s, PositionAcceptance()).observe(k, accepted)

    def shares(self, length: int) -> tuple[float, ...]:
        """Return the shares that differ at this context: all above the floor, and one below."""
        above = [s for s in self.ss if s * length > self.min_budget]
        below = [s for s in self.ss if s * length <= self.min_budget]
        return (*below[-1:], *above)

    def prospects(self, length: int) -> list[Prospect]:
        """Return what each setting would give at a context of `length` tokens."""
        found = []
        rest = self.costs.rests(self.ks, length)
        most = max(self.ks)
        for s in self.shares(length):
            draft = self.costs.draft_seconds(s, length)
            own = self._acceptance.get(s) or PositionAcceptance()
            chances = self._chances(s, own, most)
            spread = list(zip(chances, own.deviations(chances), strict=True))
            likely = mean_tokens(chances)
            hoped = mean_tokens([min(mean + one, 1.0) for mean, one in spread])
            doubted = mean_tokens([max(mean - DOUBT * one, 0.0) for mean, one in spread])
            for k, rest_seconds in zip(self.ks, rest, strict=True):
                seconds = max(k * draft + rest_seconds, 1e-9)
                found.append(
                    Prospect(
                        k,
                        s,
                        rate=likely[k] / seconds,
                        hoped_rate=hoped[k] / seconds,
                        doubted_rate=doubted[k] / seconds,
                        best_rate=(k + 1) / seconds,
                        seconds=seconds,
                        tokens=likely[k],
                    )
                )
        return found

    def plain_rate(self, length: int) -> float:
        """Return the tokens a second of plain decoding, of one sequence."""
        return 1.0 / max(self.costs.plain.at(length), 1e-9)

    def _chances(self, s: float, own: PositionAcceptance, k: int) -> list[float]:
        """Return the chances of a share, which start from those of its best-known neighbour."""
        tried = [(share, seen) for share, seen in self._acceptance.items() if share != s]
        if not tried or own.rounds >= 50:
            return own.chances(k)
        share, seen = min(tried, key=lambda pair: abs(pair[0] / s - s / pair[0]))
        factor = (share / s) ** SHARE_POWER
        prior = [max(0.0, 1.0 - (1.0 - chance) * factor) for chance in seen.chances(k)]
        return own.chances(k, prior=prior)
