"""The cost gate: speculation as far as it pays on the model at hand, plain decoding elsewhere."""

from __future__ import annotations

from dataclasses import replace

from pillarattn.decoding.cost_gate.choice import Choice, ObservedRound
from pillarattn.decoding.cost_gate.outlook import Outlook, Prospect
from pillarattn.decoding.cost_gate.trials import GROWTH

KS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
SS = (0.02, 0.05, 0.1, 0.2)
MAX_K = max(KS)
# Where `s="auto"` begins.
FIRST_S = 0.05
FIRST_K = 2
# Plain steps that are timed first, and rounds that are tried then: the first of each may compile.
WARM_STEPS = 3
WARM_ROUNDS = 2
# Rounds that a choice holds for; a plain one until the next trial is due, between the two.
PLAIN_HOLD = 16
LONGEST_HOLD = 64
SPECULATIVE_HOLD = 4
PROBE_HOLD = 2
# How much better another setting must be.
GAIN = 1.03
# Time that trials may lose against the best known setting: a share of all, and plain steps.
TRIAL_SHARE = 0.012
TRIAL_STEPS = 3.0
# Share of what is left of a call that a trial may lose at worst.
RISK = 0.015
# Rounds by which a trial is made longer whose passes all ran for the first times.
MOST_REPEATS = 4
NEIGHBOUR_EVERY = 8
PLAIN_EVERY = 64
CLOSE_EVERY = 8
# How much faster speculation must be for plain decoding to be out of the question, and below what
# the two are close.
CLEAR_GAIN = 1.5
CLOSE_GAIN = 1.2
# Measurements of a setting after which its times are believed.
CERTAIN = 3
# With fewer tokens left nothing is tried: what is known decides.
LEAST_ROOM = 64
# Where first passes are slow, a first call tries nothing with so few left: what it would pay for
# them no later call may ever earn.
SHORT_ROOM = 256


class CostGate:
    """Compares the tokens a second of each (k, s) with plain decoding's, and tries what it must.

    Times are measured on the rounds themselves: plain steps, draft steps by share, and the rest of
    a round by k, each as a function of the context. Acceptance is counted by position. A trial (of
    speculation while decoding plainly, of neighbours while speculating) may lose no more than a
    small share of the time so far, so that a long run stays close to the best setting known.

    Where passes are recorded, the first ones of each shape are slower than all later ones: such
    rounds are paid for, and tell nothing of times. A trial goes on until some tell.

    Args:
        ks: drafts a round to choose from, ascending, each >= 1.
        ss: shares to choose from, ascending.
        min_budget: keys that drafts may always read.
        known: what earlier generations have learnt with the same arguments; None: nothing.

    Raises:
        ValueError: there is nothing to choose from.
    """

    def __init__(
        self,
        ks: tuple[int, ...] = KS,
        ss: tuple[float, ...] = SS,
        min_budget: int = 128,
        *,
        known: Outlook | None = None,
    ) -> None:
        if not ks or min(ks) < 1 or not ss or not 0 < min(ss) <= max(ss) <= 1:
            raise ValueError(
                f"a gate chooses from ks >= 1 and shares 0 < s <= 1, got ks={ks!r}, ss={ss!r}"
            )
        self.outlook = known or Outlook(tuple(ks), tuple(ss), min_budget)
        self._is_first_call = known is None
        self.choice = Choice(0, self._first_s(), 1, "measure plain")
        self._elapsed = 0.0
        self._lost = 0.0
        # Seconds a token of the setting that a trial is measured against; None: no trial runs.
        self._reference: float | None = None
        # Rounds since the last trial of a neighbour, and since a plain step was timed.
        self._since_neighbour = 0
        self._since_plain = 0
        # What ran before the trial that runs now, and goes on if the trial shows nothing better.
        self._base: Choice | None = None
        # Tokens that a row may still emit.
        self._room = 0
        # Rounds of the running trial that told times, and by how many it was made longer.
        self._told = self._repeats = 0
        # Of a plain step, since the last choice; None: nothing is known yet.
        self._plain_seconds: float | None = None

    def _first_s(self) -> float:
        return min(self.outlook.ss, key=lambda s: abs(s - FIRST_S))

    @property
    def lost_seconds(self) -> float:
        """Seconds that trials have lost so far against the best setting known."""
        return self._lost

    def choose(self, length: int, room: int) -> Choice:
        """Return how to decode the coming rounds; see `Gate`."""
        if self._is_untold(room):
            self._repeats += 1
            self.choice = replace(self.choice, rounds=1)
            return self.choice
        self._reference = None
        self._told = self._repeats = 0
        self.choice = self._next(length, room)
        plain = self.outlook.costs.plain
        self._plain_seconds = plain.at(length) if plain.count else None
        return self.choice

    def _is_untold(self, room: int) -> bool:
        """Whether a trial runs that has told no times yet, and is to go on."""
        goes_on = self._repeats < MOST_REPEATS and room >= LEAST_ROOM
        return self._reference is not None and not self._told and goes_on

    def observe(self, done: ObservedRound) -> None:
        """Learn times and acceptance from a round."""
        outlook, costs = self.outlook, self.outlook.costs
        if done.k and outlook.settles and done.s not in outlook.ran_shares:
            # Selections of another size may have been compiled.
            done = replace(done, is_settled=False)
        outlook.ran_shares |= {done.s} if done.k else set()
        usual = self._expected(done)
        tells = done.is_usual and done.is_settled
        outlook.settles |= not done.is_settled
        if done.k == 0:
            outlook.trials.plain_since += 1
        else:
            self._since_neighbour += 1
            self._since_plain += 1
            outlook.add_acceptance(done.k, done.s, list(done.accepted))
        if tells:
            self._learn_times(done)
        if tells and done.k and costs.plain.count and costs.measured(done.k, done.s) > 1:
            usual = costs.round_seconds(done.k, done.s, done.length)
        # A stall would make it a trial's whole fault.
        seconds = min(done.seconds, 2.0 * usual)
        self._elapsed += seconds
        outlook.trials.elapsed += seconds
        if self._reference is None or not done.accepted:
            return
        worth = (1 + sum(done.accepted) / len(done.accepted)) * self._reference
        if done.is_settled:
            self._lost += max(0.0, seconds - worth)
        else:
            outlook.trials.pay(max(0.0, done.seconds - worth), counts=costs.rounds >= WARM_ROUNDS)

    def _expected(self, done: ObservedRound) -> float:
        """Return a round's seconds as they were expected before it."""
        if self._plain_seconds is None:
            return done.seconds
        if done.k and self.outlook.costs.rounds:
            return self.outlook.costs.round_seconds(done.k, done.s, done.length)
        # Before any round is known, each of its passes counts as a plain one.
        return self._plain_seconds * (done.k + 1)

    def _learn_times(self, done: ObservedRound) -> None:
        costs = self.outlook.costs
        # A trial tells times of its own kind: a step that scores comes before it.
        self._told += (done.k > 0) == (self.choice.k > 0)
        if done.k == 0:
            self._since_plain = 0
            costs.add_plain(done.length, done.seconds)
            return
        self.outlook.trials.told_at = done.length
        rest = max(done.seconds - done.draft_seconds, 0.0)
        costs.add_round(
            done.k, done.s, done.length, draft=done.draft_seconds, rest=rest, width=done.width
        )

    def _next(self, length: int, room: int) -> Choice:
        costs = self.outlook.costs
        if costs.plain.count < WARM_STEPS:
            return self._plain(length, WARM_STEPS - costs.plain.count, "measure plain")
        self._room = room
        if costs.rounds < WARM_ROUNDS:
            is_short = self._is_first_call and self.outlook.settles and room <= SHORT_ROOM
            if is_short or room < LEAST_ROOM:
                return self._plain(length, room, "too few tokens left")
            return self._first_trial(length)
        plain = self.outlook.plain_rate(length)
        prospects = self.outlook.prospects(length)
        best = max(prospects, key=lambda one: one.rate)
        # A trial counts as what was running before it.
        running = self._base or self.choice
        if running.k == 0:
            return self._from_plain(length, plain, prospects, best)
        return self._from_speculation(length, plain, prospects, best, running)

    def _first_trial(self, length: int) -> Choice:
        self._base = self._plain(length, 1, "measure plain")
        self.outlook.trials.tried_at = length
        self._reference = 1.0 / self.outlook.plain_rate(length)
        k = min(self.outlook.ks, key=lambda one: abs(one - FIRST_K))
        plain = self.outlook.plain_rate(length)
        s = min(self.outlook.shares(length), key=lambda one: abs(one - FIRST_S))
        return Choice(k, s, 1, "first probe", None, plain)

    def _from_plain(
        self, length: int, plain: float, prospects: list[Prospect], best: Prospect
    ) -> Choice:
        """Go over to speculation, try it, or stay."""
        trials = self.outlook.trials
        if best.rate > plain * GAIN and best.doubted_rate > plain:
            self._base = None
            trials.succeed()
            return self._speculate(best, plain, "speculation pays")
        bearable = [one for one in prospects if self._bears(one, plain, length)]
        hoped = max(bearable, key=lambda one: one.hoped_rate, default=best)
        # A time or two may have been taken in a bad moment.
        is_certain = self.outlook.costs.measured(hoped.k, hoped.s) >= CERTAIN
        if is_certain and max(one.best_rate for one in prospects) <= plain:
            self._base = None
            return self._plain(length, LONGEST_HOLD, "no draft can pay")
        loss = hoped.seconds - hoped.tokens / plain
        goes_on = self._base is not None and hoped.hoped_rate > plain * GAIN
        is_wanted = bearable and (goes_on or trials.is_due(length))
        if is_wanted and self._affords(PROBE_HOLD * loss, length, self._coming(hoped, length)):
            trials.begin(length, goes_on=goes_on)
            self._base = self._plain(length, 1, "speculation does not pay")
            self._reference = 1.0 / plain
            return self._speculate(hoped, plain, "probe", PROBE_HOLD)
        self._base = None
        is_close = best.rate * CLOSE_GAIN > plain
        hold = PLAIN_HOLD if is_close else max(trials.wait - trials.plain_since, PLAIN_HOLD)
        return self._plain(length, min(hold, LONGEST_HOLD), "speculation does not pay")

    def _from_speculation(
        self, length: int, plain: float, prospects: list[Prospect], best: Prospect, running: Choice
    ) -> Choice:
        """Stay, move to another setting, try a neighbour, or give up."""
        self._base = None
        if best.rate < plain:
            self.outlook.trials.end_speculation(length)
            return self._plain(length, PLAIN_HOLD, "speculation does not pay")
        now = next((p for p in prospects if (p.k, p.s) == (running.k, running.s)), best)
        if best.rate > now.rate * GAIN:
            now = best
        settled = self._speculate(now, plain, "speculation pays")
        if self._plain_is_old(length, now.rate / plain) and self._affords(
            1 / plain - 1 / now.rate, length
        ):
            self._base = settled
            self._reference = 1.0 / now.rate
            return self._plain(length, 1, "measure plain again")
        if self._since_neighbour >= NEIGHBOUR_EVERY:
            self._since_neighbour = 0
            other = self._neighbour(now, prospects, length)
            if other is not None:
                loss = other.seconds - other.tokens / now.rate
                coming = self._coming(other, length)
                if self._affords(PROBE_HOLD * loss, length, coming):
                    self._base = settled
                    self._reference = 1.0 / now.rate
                    return self._speculate(other, plain, "probe a neighbour", PROBE_HOLD)
        return settled

    def _neighbour(self, now: Prospect, prospects: list[Prospect], length: int) -> Prospect | None:
        """Return the setting beside `now` that may be better, the most promising one."""
        ks, ss = self.outlook.ks, self.outlook.ss
        at_k, at_s = ks.index(now.k), ss.index(now.s)
        near = [
            one
            for one in prospects
            if (one.k, one.s) != (now.k, now.s)
            and abs(ks.index(one.k) - at_k) <= 2
            and abs(ss.index(one.s) - at_s) <= 1
            and one.hoped_rate > now.rate
            and self._coming(one, length) <= RISK * self._room / now.rate
        ]
        known = self.outlook.costs.measured

        def promise(one: Prospect) -> float:
            # The times of what never ran are guessed too.
            return one.hoped_rate * (1.0 if known(one.k, one.s) else GAIN)

        return max(near, key=promise, default=None)

    def _plain_is_old(self, length: int, gain: float) -> bool:
        """Whether plain decoding must be timed anew, where speculation is `gain` times as fast."""
        if gain > CLEAR_GAIN:
            # A longer context does not make plain steps faster: only the machine could.
            return self._since_plain >= 4 * PLAIN_EVERY
        known = self.outlook.costs.plain.last_length
        is_far = not known / GROWTH <= length <= known * GROWTH
        # A close call takes more measurements, which then cost little.
        every = CLOSE_EVERY if gain < CLOSE_GAIN else PLAIN_EVERY
        return is_far or self._since_plain >= every

    def _coming(self, one: Prospect, length: int) -> float:
        """Return the seconds that a trial may lose to what runs for the first times in it."""
        is_new = not self.outlook.costs.ran(one.k, one.s)
        return self.outlook.trials.coming(length, is_new=is_new)

    def _bears(self, one: Prospect, plain: float, length: int) -> bool:
        """Whether a trial may fail entirely, with no draft accepted, and cost little of a call."""
        loss = PROBE_HOLD * (one.seconds - 1 / plain) + self._coming(one, length)
        return loss <= RISK * self._room / plain

    def _affords(self, loss: float, length: int, coming: float = 0.0) -> bool:
        if self._room < LEAST_ROOM or not self.outlook.trials.may_invest(coming):
            return False
        step = 1.0 / self.outlook.plain_rate(length)
        return self._lost + max(loss, 0.0) <= TRIAL_SHARE * self._elapsed + TRIAL_STEPS * step

    def _plain(self, length: int, rounds: int, reason: str) -> Choice:
        rate = self.outlook.plain_rate(length) if self.outlook.costs.plain.count else None
        return Choice(0, self.choice.s, max(rounds, 1), reason, rate, rate)

    @staticmethod
    def _speculate(
        one: Prospect, plain: float, reason: str, rounds: int = SPECULATIVE_HOLD
    ) -> Choice:
        return Choice(one.k, one.s, rounds, reason, one.rate, plain)
