"""Whether rounds that begin should draft: whichever way has brought more tokens a second."""

from __future__ import annotations

from statistics import median

# Rounds of a window, whose rate counts, and of the steps before it, which do not: phases level out
# and passes are recorded.
ROUNDS, SETTLING = 3, 2
# The other way must be better by this.
MARGIN = 1.03
# Windows until the other way is tried again, and the most that this grows to while it loses.
HOLD, LONGEST_HOLD = 24, 192
# Factor of the requests by which what was measured holds no more.
CHANGE = 1.5
# A trial whose first round falls short by this factor ends with it.
HOPELESS = 1.3
# A step that took longer than this many usual ones has recorded something, or was interrupted.
OUTLIER = 4.0


class SpeculationGate:
    """Measures steps with and without drafts and says which way the next rounds go.

    Both ways give the same tokens where drafts do (greedy, seeded noise): only the time differs.

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
        self._is_trial = False
        self._begin(self._settling)

    def stepped(self, seconds: float, tokens: int, requests: int) -> None:
        """Take in a step that decoded and did nothing else.

        Args:
            seconds: that it took.
            tokens: that it brought.
            requests: that took part.
        """
        if max(requests, self._requests) > CHANGE * min(requests, self._requests):
            # Another batch: neither rate says anything of it.
            self._requests, self._hold, self._is_trial = requests, HOLD, False
            self._rates.clear()
            self._begin(self._settling)
        if self._unsettled > 0:
            self._unsettled -= 1
            return
        self._seconds.append(seconds)
        self._tokens += tokens
        steps, other = len(self._seconds), self._rates.get(not self.drafts)
        is_hopeless = (
            steps == self._round and self._is_trial and other is not None
            and other > HOPELESS * self._rate
        )  # fmt: skip
        if steps == self._window or is_hopeless:
            self._decide(other)

    @property
    def _rate(self) -> float:
        """Tokens a second of the window so far."""
        longest = OUTLIER * median(self._seconds)
        return self._tokens / max(sum(min(s, longest) for s in self._seconds), 1e-9)

    def _decide(self, other: float | None) -> None:
        """Go on with the better way, or try the other one, whose rate is `other`."""
        rate = self._rates[self.drafts] = self._rate
        self._held += 1
        if other is not None and other > MARGIN * rate:
            # Of a trial it is the way that was left for it, which lasts the longer.
            self._hold = min(2 * self._hold, LONGEST_HOLD) if self._is_trial else HOLD
            self._switch(is_trial=False)
        elif other is None or self._held >= self._hold:
            self.trials += 1
            self._switch(is_trial=True)
        else:
            if self._is_trial:
                self._hold = HOLD
            self._is_trial = False
            self._begin(0)

    def _switch(self, *, is_trial: bool) -> None:
        self.drafts, self._is_trial, self._held = not self.drafts, is_trial, 0
        self._begin(self._settling)

    def _begin(self, unsettled: int) -> None:
        self._unsettled, self._tokens = unsettled, 0
        self._seconds: list[float] = []
