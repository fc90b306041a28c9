"""Whether rounds that begin should draft: whichever way has brought more tokens a second."""

from __future__ import annotations

from math import fsum
from statistics import median

# Rounds of a window, whose rate counts, and of the steps before it, which do not: phases level out.
ROUNDS, SETTLING = 3, 2
# Steps that a window leaves out at most since they were unusual; after these every step counts.
PATIENCE = 64
# The other way must be better by this.
MARGIN = 1.03
# Windows until the other way is tried again, and the most that this grows to while it loses.
HOLD, LONGEST_HOLD = 24, 192
# Share of the time that lost trials may take: they record passes, which may have to be paid again.
LOSS = 0.015
# Factor of the requests by which what was measured holds no more.
CHANGE = 1.5
# A trial whose first round falls short by this factor ends with it.
HOPELESS = 1.3
# A step that took longer than this many usual ones was interrupted.
OUTLIER = 4.0


class SpeculationGate:
    """Measures steps with and without drafts and says which way the next rounds go.

    Both ways give the same tokens where drafts do (greedy, seeded noise): only the time differs.
    Steps count in rounds of k + 1 consecutive ones, in which each request of a cruise verifies once
    (with plans made ahead it idles for one more, so that windows hold some more or fewer of them):
    a round with a step in it that was not as most will be (compiled, recorded, compared) is left
    out.

    Args:
        k: drafts of a round.

    Attributes:
        drafts: whether rounds that begin draft.
        trials: times that the other way was tried.
    """

    def __init__(self, k: int) -> None:
        self.drafts, self.trials = True, 0
        self._round, self._window, self._settling = k + 1, ROUNDS * (k + 1), SETTLING * (k + 1)
        self._rates: dict[bool, float] = {}
        self._requests = 0
        self._hold, self._held = HOLD, 0
        self._is_trial = self._cruises = False
        # Seconds and tokens since it turned, and seconds that the last trial has lost.
        self._spent = self._brought = self._price = 0.0
        self._begin(self._settling)

    def stepped(
        self, seconds: float, tokens: int, requests: int, *, is_usual: bool = True,
        cruises: bool = False,
    ) -> None:  # fmt: skip
        """Take in a step that decoded and did nothing else.

        Args:
            seconds: that it took.
            tokens: that it brought.
            requests: that took part; 0: it says nothing.
            is_usual: whether it ran as most steps do, and recorded nothing.
            cruises: whether it ran without a plan; plans take longer.
        """
        if not requests:
            return
        if max(requests, self._requests) > CHANGE * min(requests, self._requests):
            # Another batch: neither rate says anything of it.
            self._requests, self._hold, self._is_trial = requests, HOLD, False
            self._spent = self._brought = 0.0
            self._rates.clear()
            self._begin(self._settling)
        flips, self._cruises = cruises != self._cruises, cruises
        self._spent += seconds
        self._brought += tokens
        self._patience -= 1
        if (flips or not is_usual) and self._patience >= 0:
            self._leave_out(everything=flips)
        elif self._unsettled > 0:
            self._unsettled -= 1
        else:
            self._take(seconds, tokens)

    @property
    def _rate(self) -> float:
        """Tokens a second of the window so far."""
        longest = OUTLIER * median(seconds for seconds, _ in self._steps)
        # As exact on every Python: the built-in sum rounds otherwise from 3.12 on.
        spent = fsum(min(seconds, longest) for seconds, _ in self._steps)
        return sum(tokens for _, tokens in self._steps) / max(spent, 1e-9)

    def _leave_out(self, *, everything: bool) -> None:
        """Drop the round that has begun, or `everything`: what comes is not like what was."""
        if everything:
            self._steps.clear()
            self._unsettled = self._settling
        del self._steps[len(self._steps) // self._round * self._round :]
        # The next step does not wait for the device, and seems short.
        self._unsettled = max(self._unsettled, 1)

    def _take(self, seconds: float, tokens: int) -> None:
        """Count a step, and decide where it was the last one that this needs."""
        self._steps.append((seconds, tokens))
        steps, other = len(self._steps), self._rates.get(not self.drafts)
        is_hopeless = (
            steps == self._round and self._is_trial and other is not None
            and other > HOPELESS * self._rate
        )  # fmt: skip
        if steps == self._window or is_hopeless:
            self._decide(other)

    def _decide(self, other: float | None) -> None:
        """Go on with the better way, or try the other one, whose rate is `other`."""
        rate = self._rates[self.drafts] = self._rate
        self._held += 1
        if other is not None and other > MARGIN * rate:
            if self._is_trial:
                # It is the way that was left for it, which lasts the longer.
                self._hold = min(2 * self._hold, LONGEST_HOLD)
                self._price = self._spent - self._brought / other
            else:
                self._hold, self._price = HOLD, 0.0
            self._switch(is_trial=False)
        elif other is None or self._is_due:
            self.trials += 1
            self._switch(is_trial=True)
        else:
            if self._is_trial:
                self._hold, self._price = HOLD, 0.0
            self._is_trial = False
            self._begin(0)

    @property
    def _is_due(self) -> bool:
        """Whether the other way should be tried again."""
        is_paid = self._price <= LOSS * self._spent
        return self._held >= (self._hold if is_paid else LONGEST_HOLD)

    def _switch(self, *, is_trial: bool) -> None:
        self.drafts, self._is_trial, self._held = not self.drafts, is_trial, 0
        self._spent = self._brought = 0.0
        self._begin(self._settling)

    def _begin(self, unsettled: int) -> None:
        self._unsettled, self._patience = unsettled, PATIENCE + unsettled + self._window
        self._steps: list[tuple[float, int]] = []
