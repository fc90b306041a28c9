"""What trials have cost, and when the next one is due, from one call to the next."""

from __future__ import annotations

from dataclasses import dataclass

# Plain steps before the next trial; doubles with each that fails.
FIRST_WAIT = 32
LAST_WAIT = 1024
# Growth of the context that calls for another look.
GROWTH = 1.15
# Of all time, what trials may lose to passes that run for the first times, once drafts are known.
INVESTED_SHARE = 0.01
# Change of the context after which passes may have another shape, and how many rounds that makes
# slower: a pass is run, then recorded, and the first of a kind compared.
RESHAPED = 1.02
SLOW_ROUNDS = 2


@dataclass
class Trials:
    """The account of a gate's trials of speculation while it decodes plainly.

    Attributes:
        elapsed: seconds decoded so far.
        invested: of them, what trials lost to passes that ran for the first times; what it took to
            measure drafts at all does not count.
        plain_since: plain steps since the last trial.
        wait: how many there must be before the next one.
        tried_at: tokens of context at the last one.
        told_at: tokens of context where a round that drafts was measured last.
        slow: the least that a round lost whose passes ran for the first times, seconds.
    """

    elapsed: float = 0.0
    invested: float = 0.0
    plain_since: int = 0
    wait: int = FIRST_WAIT
    tried_at: int = 0
    told_at: int = 0
    slow: float = 0.0

    def coming(self, length: int, *, is_new: bool) -> float:
        """Return the seconds that a trial may lose to passes that run for the first times.

        Args:
            length: tokens of context.
            is_new: whether no round had verify passes of its width yet, or drafts of its share.
        """
        is_near = self.told_at / RESHAPED <= length <= self.told_at * RESHAPED
        return SLOW_ROUNDS * self.slow if is_new or not is_near else 0.0

    def may_invest(self, coming: float) -> bool:
        """Whether such passes cost little of all time, `coming` seconds included."""
        return self.invested + coming <= INVESTED_SHARE * self.elapsed

    def pay(self, seconds: float, *, counts: bool) -> None:
        """Note what a round of a trial lost to passes that ran for the first times.

        Args:
            seconds: that.
            counts: whether it is a cost of this trial, and not of measuring drafts at all.
        """
        self.slow = min(self.slow, seconds) if self.slow else seconds
        if counts:
            self.invested += seconds

    def is_due(self, length: int) -> bool:
        """Whether it is time for another one at a context of `length` tokens."""
        return self.plain_since >= self.wait or self._is_longer(length)

    def begin(self, length: int, *, goes_on: bool) -> None:
        """Note a trial; one that goes on where the last one ended has not failed."""
        if not goes_on:
            self.wait = FIRST_WAIT if self._is_longer(length) else min(self.wait * 2, LAST_WAIT)
        self.end_speculation(length)

    def end_speculation(self, length: int) -> None:
        """Note that rounds at `length` have drafted: plain steps count from here."""
        self.plain_since = 0
        self.tried_at = length

    def succeed(self) -> None:
        """Note that speculation pays."""
        self.wait = FIRST_WAIT

    def _is_longer(self, length: int) -> bool:
        return length > self.tried_at * GROWTH
