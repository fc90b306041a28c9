"""How many drafts a round accepts: from one chance, from chances by position, from a table.

`alpha` is the chance that a draft is accepted given that all drafts before it were. It is not the
acceptance rate (accepted / drafted, the paper's alpha), which also counts drafts after a rejection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

Acceptance = Callable[[int, float], float]
"""Mean accepted drafts of a round, as a function of k and s."""


def mean_accepted(alpha: float, k: int) -> float:
    """Return E[accepted] of `k` drafts, each accepted with chance `alpha` while all before were.

    Closed form of alpha + alpha^2 + ... + alpha^k.
    """
    _check_chance("alpha", alpha)
    _check_k(k)
    # The geometric quotient loses all digits near alpha = 1.
    return sum(alpha**j for j in range(1, k + 1))


def acceptance_length(alpha: float, k: int) -> float:
    """Return E[tokens emitted per round], (1 - alpha^(k+1)) / (1 - alpha), the bonus included."""
    return mean_accepted(alpha, k) + 1


def acceptance_rate(alpha: float, k: int) -> float:
    """Return E[accepted] / k, the paper's alpha; 0 where nothing is drafted."""
    return mean_accepted(alpha, k) / k if k else 0.0


def alpha_of(accepted: float, k: int) -> float:
    """Return the chance per draft that gives `accepted` accepted drafts of `k` on average.

    Inverse of `mean_accepted`, by bisection to the last bit that matters. For k = 8: 6.16 gives
    0.9416, 5.94 gives 0.933, 4.62 gives 0.876.

    Raises:
        ValueError: `accepted` is not within 0..k, or k < 1.
    """
    _check_k(k, minimum=1)
    if not 0 <= accepted <= k:
        raise ValueError(f"accepted must be within 0 and k = {k}, got {accepted}")
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if mean_accepted(middle, k) < accepted:
            low = middle
        else:
            high = middle
    return high


def mean_accepted_by_position(chances: Sequence[float]) -> float:
    """Return E[accepted] where draft j is accepted with `chances[j]` if all before it were."""
    return sum(survival(chances))


def survival(chances: Sequence[float]) -> list[float]:
    """Return the chance that drafts 1..j are all accepted, for each j."""
    for chance in chances:
        _check_chance("a chance", chance)
    return list(accumulate(chances, mul))


def accepted_law(chances: Sequence[float]) -> list[float]:
    """Return the chance that exactly n drafts are accepted, for n = 0..k."""
    reach = [1.0, *survival(chances), 0.0]
    return [reach[n] - reach[n + 1] for n in range(len(chances) + 1)]


def chances_from_counts(accepted: Sequence[int], drafted: Sequence[int]) -> list[float]:
    """Return the chance of each draft given all before it, from the counts of `pillar.stats`.

    Args:
        accepted: `accepted_by_position`: rounds that accepted draft j.
        drafted: `drafted_by_position`: rounds that drafted it.

    Raises:
        ValueError: the lists differ in length, or more was accepted than drafted.
    """
    if len(accepted) != len(drafted):
        raise ValueError(
            f"accepted and drafted must be of one length, got {len(accepted)} and {len(drafted)}"
        )
    rates = []
    for a, n in zip(accepted, drafted, strict=True):
        if not 0 <= a <= n:
            raise ValueError(f"accepted must be within 0 and drafted, got {a} of {n}")
        rates.append(a / n if n else 0.0)
    before = [1.0, *rates]
    # A ratio above 1 can only come from rounds of different length; it is no chance.
    return [
        min(rate / prior, 1.0) if prior else 0.0 for rate, prior in zip(rates, before, strict=False)
    ]


def constant_acceptance(alpha: float) -> Acceptance:
    """Return mean accepted as a function of (k, s) for one chance per draft, whatever s is."""
    _check_chance("alpha", alpha)
    return lambda k, s: mean_accepted(alpha, k)


def positional_acceptance(chances: Sequence[float]) -> Acceptance:
    """Return mean accepted for measured chances by position, whatever s is.

    A `k` beyond the measured positions raises `ValueError`: later drafts are accepted less often,
    by an amount that nobody measured.
    """
    sums = [0.0, *accumulate(survival(chances))]

    def mean(k: int, s: float) -> float:
        _check_k(k)
        if k >= len(sums):
            raise ValueError(f"acceptance was measured up to k = {len(sums) - 1}, got k = {k}")
        return sums[k]

    return mean


@dataclass(frozen=True)
class AcceptanceTable:
    """Measured mean accepted drafts at some (k, s), callable at others.

    Between two values of s, the chance per draft is interpolated in log s. Another k takes the
    chance per draft of the nearest k that was measured at that s, which assumes that later drafts
    are as good as earlier ones: trust it near measured points.

    Attributes:
        points: mean accepted drafts by (k, s).
    """

    points: Mapping[tuple[int, float], float]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("an acceptance table needs at least one measured (k, s)")
        for (k, s), accepted in self.points.items():
            _check_k(k, minimum=1)
            if not 0 < s <= 1:
                raise ValueError(f"s must be within 0 < s <= 1, got {s}")
            alpha_of(accepted, k)

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]], **filters: Any) -> AcceptanceTable:
        """Build a table from records with `k`, `s` and `mean_accepted`, such as a probe's.

        `filters` keep the records whose fields equal them: `strategy="pillar"`, `temperature=0.6`.

        Raises:
            ValueError: no record is left, or two of them claim the same (k, s).
        """
        points: dict[tuple[int, float], float] = {}
        for record in records:
            if any(record.get(name) != value for name, value in filters.items()):
                continue
            missing = [name for name in ("k", "s", "mean_accepted") if name not in record]
            if missing:
                raise ValueError(f"an acceptance record needs {', '.join(missing)}: {dict(record)}")
            key = (int(record["k"]), float(record["s"]))
            if key in points:
                raise ValueError(
                    f"two records for k = {key[0]}, s = {key[1]}; filter by strategy or temperature"
                )
            points[key] = float(record["mean_accepted"])
        return cls(points)

    @property
    def ks(self) -> list[int]:
        """Every measured k, ascending."""
        return sorted({k for k, _ in self.points})

    @property
    def ss(self) -> list[float]:
        """Every measured s, ascending."""
        return sorted({s for _, s in self.points})

    def __call__(self, k: int, s: float) -> float:
        """Return mean accepted drafts at (k, s); an s outside the measured ones is an error."""
        _check_k(k)
        if (k, s) in self.points or not k:
            return self.points[k, s] if k else 0.0
        lower = [measured for measured in self.ss if measured <= s]
        upper = [measured for measured in self.ss if measured >= s]
        if not lower or not upper:
            raise ValueError(
                f"acceptance was measured for s from {self.ss[0]} to {self.ss[-1]}, got s = {s}"
            )
        left, right = lower[-1], upper[0]
        share = 0.0 if left == right else math.log(s / left) / math.log(right / left)
        chance = (1 - share) * self._alpha(k, left) + share * self._alpha(k, right)
        return mean_accepted(chance, k)

    def _alpha(self, k: int, s: float) -> float:
        measured = [other for other, at in self.points if at == s]
        nearest = min(measured, key=lambda other: (abs(other - k), other))
        return alpha_of(self.points[nearest, s], nearest)


def _check_chance(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be within 0 and 1, got {value}")


def _check_k(k: int, *, minimum: int = 0) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < minimum:
        raise ValueError(f"k must be an integer >= {minimum}, got {k!r}")
