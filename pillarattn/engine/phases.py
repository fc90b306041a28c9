"""Who drafts and who verifies in a step, so that its rows stay level or, as a strawman, do not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import fsum

from pillarattn.registry import Registry


@dataclass
class Progress:
    """Where a decoding request stands in its round.

    Attributes:
        request_id: whose round it is.
        k: drafts that the round will have at most; 0 where no step drafts: plain decoding, and
            drafts that come all at once.
        drafted: drafts that it has.
        waited: steps that it has stood idle with all its drafts.
    """

    request_id: str
    k: int
    drafted: int = 0
    waited: int = 0

    @property
    def is_due(self) -> bool:
        """Whether nothing is left to draft."""
        return self.drafted >= self.k

    @property
    def verify_rows(self) -> int:
        """Rows of a verify pass now: the newest token and the drafts."""
        return self.drafted + 1


@dataclass(frozen=True)
class Phases:
    """What each decoding request does in a step; every one of them is in exactly one list."""

    drafts: tuple[Progress, ...] = ()
    verifies: tuple[Progress, ...] = ()
    idle: tuple[Progress, ...] = ()

    @property
    def rows(self) -> int:
        """Rows that the step's matrix products have of them."""
        return len(self.drafts) + sum(p.verify_rows for p in self.verifies)


def level_rows(running: Sequence[Progress]) -> float:
    """Return the rows of a step if rounds were spread evenly: the sum of (2k + 1) / (k + 1)."""
    # As exact on every Python: the built-in sum rounds otherwise from 3.12 on.
    return fsum((2 * p.k + 1) / (p.k + 1) for p in running)


class PhasePolicy(ABC):
    """Splits the decoding requests of each step; keeps what it must remember between steps."""

    @abstractmethod
    def split(self, running: Sequence[Progress]) -> Phases:
        """Return who does what; `running` is in order of admission and nobody else can move."""

    def waits(self, flying: Collection[str]) -> bool:
        """Whether nobody should move before the passes of `flying` have been looked at."""
        return False


PHASE_POLICIES: Registry[PhasePolicy] = Registry("phase policy")


@PHASE_POLICIES.register("unified")
class UnifiedPhases(PhasePolicy):
    """Verify as many requests in each step as fall due on average, those with most drafts first.

    Each request earns 1 / (k + 1) of a verify pass a step. Where departures, a return from the host
    or a long prompt leave fewer requests with all their drafts than have been earned, the next ones
    verify with the drafts they have; where more fall due at once, the rows may rise by `tolerance`
    over the level and the rest wait, longest wait first. So the phases level out again at once and
    not only as requests come and go. Shorter rounds change the speed, never the output. Requests of
    one k are levelled among themselves.

    Args:
        tolerance: share by which the rows of a step may exceed the level.
    """

    def __init__(self, tolerance: float = 0.1) -> None:
        self.tolerance = tolerance
        self._earned: dict[int, float] = {}

    def split(self, running: Sequence[Progress]) -> Phases:
        """Return the phases of one step."""
        # Without steps that draft there is no pass that could come sooner or later.
        chosen = [p for p in running if p.k == 0]
        waiting: list[Progress] = []
        early: list[Progress] = []
        groups: dict[int, list[Progress]] = {}
        for progress in running:
            if progress.k:
                groups.setdefault(progress.k, []).append(progress)
        self._earned = {k: self._earned.get(k, 0.0) for k in groups}
        for k, group in groups.items():
            quota = self._quota(k, len(group))
            due = sorted((p for p in group if p.is_due), key=lambda p: -p.waited)
            rest = sorted((p for p in group if not p.is_due), key=lambda p: -p.drafted)
            sooner = max(0, quota - len(due))
            chosen += due[:quota] + rest[:sooner]
            waiting += due[quota:]
            early += rest[sooner:]
        self._level(running, chosen, waiting, early)
        for k in groups:
            left = self._earned[k] - sum(p.k == k for p in chosen)
            # Neither a debt nor savings: both would bend the steps after them.
            self._earned[k] = min(max(left, 0.0), 1.0)
        return _phases(running, chosen, waiting)

    def _quota(self, k: int, requests: int) -> int:
        """Return how many passes requests with k drafts a round have earned."""
        self._earned[k] += requests / (k + 1)
        # Sums of thirds and ninths fall short of whole numbers by rounding.
        return int(self._earned[k] + 1e-6)

    def _level(
        self, running: Sequence[Progress], chosen: list[Progress], waiting: list[Progress],
        early: list[Progress],
    ) -> None:  # fmt: skip
        """Take more passes where the rows allow it, or fall short; `chosen` and `waiting` change.

        Passes that come early have fewer rows, which a few more of them make up for.
        """
        level = level_rows(running)
        most = (1 + self.tolerance) * level
        rows = len(running) - len(waiting) + sum(p.drafted for p in chosen)
        # Passes of several k may be earned in one step. Who came sooner than he had to drafts on,
        # and who has waited least waits.
        for progress in sorted((p for p in chosen if p.k), key=lambda p: (p.is_due, p.waited)):
            if rows <= most or len(chosen) == 1:
                break
            chosen.remove(progress)
            rows -= progress.verify_rows if progress.is_due else progress.drafted
            if progress.is_due:
                waiting.append(progress)
        waiting.sort(key=lambda p: -p.waited)
        while waiting and rows + waiting[0].verify_rows <= most:
            rows += waiting[0].verify_rows
            chosen.append(waiting.pop(0))
        for progress in sorted(early, key=lambda p: p.k - p.drafted):
            falls_short = rows < (1 - self.tolerance / 2) * level
            fits = rows + progress.drafted <= level and 4 * progress.drafted >= 3 * progress.k
            if falls_short and fits:
                rows += progress.drafted
                chosen.append(progress)
        if waiting and not chosen and len(waiting) == len(running):
            # A step in which nobody moves costs a step and brings nothing.
            chosen.append(waiting.pop(0))


@PHASE_POLICIES.register("lockstep")
class LockstepPhases(PhasePolicy):
    """The strawman: all requests draft together and then verify together, a spike every k steps.

    A request that arrives or has its drafts waits for the others.
    """

    def __init__(self) -> None:
        self._round: set[str] = set()
        self._verified: set[str] = set()

    def waits(self, flying: Collection[str]) -> bool:
        """Return whether those are on the way who verified last: no round begins without them."""
        return not self._verified.isdisjoint(flying)

    def split(self, running: Sequence[Progress]) -> Phases:
        """Return the phases of one step."""
        members = [p for p in running if p.request_id in self._round]
        others = [p for p in running if p.request_id not in self._round]
        if not members:
            members, others = others, []
            self._round = {p.request_id for p in members}
        if all(p.is_due for p in members):
            self._round, self._verified = set(), {p.request_id for p in members}
            return _phases(running, members, others)
        return _phases(running, [], [p for p in members if p.is_due] + others)


def _phases(
    running: Sequence[Progress], chosen: Sequence[Progress], waiting: Sequence[Progress]
) -> Phases:
    verifying = {p.request_id for p in chosen}
    idle = {p.request_id for p in waiting}
    busy = verifying | idle
    for progress in waiting:
        progress.waited += 1
    return Phases(
        drafts=tuple(p for p in running if p.request_id not in busy),
        verifies=tuple(chosen),
        idle=tuple(waiting),
    )
