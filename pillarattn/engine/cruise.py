"""Rounds without plans: while nobody comes in and there is room, steps follow each other alone."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pillarattn.datatypes import on_device
from pillarattn.engine.chosen_keys import ChosenPart
from pillarattn.engine.cruise_door import CruiseDoor
from pillarattn.engine.cruise_inputs import StepInputs
from pillarattn.engine.cruise_members import Landing, Member, step_of
from pillarattn.engine.cruise_rounds import CruiseRounds
from pillarattn.engine.cruise_schedule import CruiseSchedule
from pillarattn.engine.cruise_sizes import cruise_sizes
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.kept_lse import KeptRound
from pillarattn.engine.kv_manager import Entry
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.outcomes import Outcomes
from pillarattn.engine.request import RequestState
from pillarattn.engine.runner import ModelRunner
from pillarattn.engine.scheduler import Scheduler
from pillarattn.engine.speculation_gate import SpeculationGate
from pillarattn.engine.step_plan import StepPlan
from pillarattn.modules.budgets import RatioBudget

# Steps after which it is tried again where it was not possible, and after a step that raised.
PATIENCE, LONG_PATIENCE = 8, 64
# Pairs of k and budget whose rounds wait for the next cruise of their kind.
MOST_HELD = 8


class Cruise:
    """Runs steps in which each request goes from round to round by itself.

    A verify pass decides on the device what stands; the next round's first draft comes in the step
    after it, with keys that were chosen on the device too: nobody idles. The host looks at a round
    while the next step runs. It reads tokens, ends requests, and sees to it that there is room for
    the rounds to come; where there is none, or somebody may come in, plans begin again.

    Args:
        runner: runs passes.
        scheduler: keeps the requests' blocks.
        outcomes: told of rounds; its requests and decoders are those of the engine.
        longest: tokens that the model takes, or None.
        gate: says whether rounds draft; None: they do.

    Attributes:
        new_rounds: makes what goes on on the device.
        rounds: that of the cruise.
    """

    new_rounds: Callable[..., CruiseRounds] = CruiseRounds
    rounds: CruiseRounds

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, outcomes: Outcomes, longest: int | None,
        gate: SpeculationGate | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._scheduler, self._outcomes = runner, scheduler, outcomes
        self._longest, self._gate = longest, gate
        self._members: list[Member] = []
        self._landings: list[Landing] = []
        self._kinds: dict[int, tuple[StepInputs, StepPlan]] = {}
        # Of earlier cruises, by drafts and budget.
        self._held: dict[tuple[int, RatioBudget], CruiseRounds] = {}
        self._step = self._retry_at = self._k = 0
        # Whether somebody has ended, whether there is no room, and whether a step was cut short.
        self._is_thinner = self._is_short = self._is_torn = False
        self._door = CruiseDoor(scheduler)

    @property
    def is_on(self) -> bool:
        """Whether requests cruise."""
        return bool(self._members)

    def take_step(self, settle: Callable[[], None]) -> StepPlan | None:
        """Run a step without a plan, and say what it did; None: there must be plans.

        Args:
            settle: looks at all passes that run, and lets those leave who have ended.

        Raises:
            Exception: see `step`.
        """
        # Who has left for want of room in the buffers, or to let others in, may begin again at
        # once: a planned step takes as long as several others.
        for _ in range(2):
            if self.is_on and not self.goes_on:
                self.leave()
            if not (self.is_on or self._begins(settle)):
                return None
            plan = self.step()
            if plan is not None:
                return plan
            self.leave()
        return None

    def _begins(self, settle: Callable[[], None]) -> bool:
        """Let requests cruise if they can, which is known once all passes have been looked at."""
        if not self.can_begin():
            return False
        settle()
        if self.can_begin():
            return self.begin()
        self._retry_at = self._scheduler.step + PATIENCE
        return False

    @property
    def goes_on(self) -> bool:
        """Whether nothing asks for a plan."""
        is_hindered = self._is_short or self._is_torn or self._turns
        return not (is_hindered or self._door.opens(len(self._members)))

    @property
    def _turns(self) -> bool:
        """Whether the gate has turned since the cruise began."""
        return self._k != self._k_of(self._members[0].decoder)

    def can_begin(self) -> bool:
        """Return whether requests can cruise, as far as that shows before passes are looked at."""
        scheduler, decoders = self._scheduler, self._outcomes.decoders
        if scheduler.step < self._retry_at:
            return False
        running = [e for e in scheduler.entries.values() if e.state is not RequestState.WAITING]
        if not running or any(e.state is not RequestState.DECODE for e in running):
            return False
        first = decoders[running[0].request_id]
        k = self._k_of(first)
        if k and not self._outcomes.selection.is_possible:
            return False
        own = ((e, decoders[e.request_id]) for e in running)
        # What a pass that runs leaves of keys and drafts shows when it has been looked at.
        are_alike = all(
            d.can_cruise and d.k == first.k and d.keys.budget == first.keys.budget
            and not e.table.away
            and (e.in_flight or bool(d.keys.selections if k else not d.drafts))
            for e, d in own
        )  # fmt: skip
        is_full = len(running) == len(scheduler.entries) or not scheduler.can_admit
        return are_alike and is_full

    def begin(self) -> bool:
        """Let requests cruise from the next step on; all passes have been looked at.

        Returns:
            Whether they do: there is room, and all have keys to draft with.
        """
        self._retry_at = self._scheduler.step + PATIENCE
        decoders, pool = self._outcomes.decoders, self._scheduler.pool
        own = [
            (entry, decoders[entry.request_id])
            for entry in self._scheduler.entries.values()
            if entry.state is RequestState.DECODE
        ]
        self._k, budget = self._k_of(own[0][1]), own[0][1].keys.budget
        missing = (pool.blocks_for(self._bound(e)) - len(e.table) for e, _ in own)
        most = max(self._bound(entry) for entry, _ in own)
        if sum(max(0, count) for count in missing) > pool.free:
            return False
        for entry, _ in own:
            entry.table.reserve(pool, self._bound(entry))
        buffers, segments = self._runner.buffers, [d.draft_row(e.table) for e, d in own]
        needed = buffers.needs(segments)
        if needed is None:
            return False
        buffers.reserve(
            cruise_sizes(needed, [d for _, d in own], most, k=self._k, pool=pool), longest=most
        )
        if self._k and self._outcomes.selection.layers != buffers.sizes.layers:
            return False
        self._door.begin()
        members = [
            Member(e.request_id, d, e, seat)
            for (e, d), seat in zip(own, buffers.seat(segments), strict=True)
        ]
        if not all(member.can_go_on(buffers, self._k) for member in members):
            return False
        members.sort(key=lambda member: member.seat.number)
        self._is_thinner = self._is_short = self._is_torn = False
        self._landings.clear()
        self._renew([len(m.decoder.drafts) for m in members])
        self.rounds = self._rounds_of(budget)
        self.rounds.begin([(m.seat.number, m.decoder) for m in members])
        # Only now: what raises before leaves nobody half-way.
        self._members = members
        return True

    def _k_of(self, decoder: RequestDecoder) -> int:
        """Return the drafts of a request's rounds, as the gate has it now."""
        return decoder.k if self._gate is None or self._gate.drafts else 0

    def step(self) -> StepPlan | None:
        """Run the next step, and look at the one before; None: there must be a plan.

        What cannot be done for all requests at once is left to a plan, which asks each for itself.

        Raises:
            Exception: what the pass raised. What came before it is not lost; it cruises no more.
        """
        # One that was interrupted may have left more: room is for one round alone.
        self._land(but=1)
        self._leave_out()
        if not self._members or not self.goes_on:
            return None
        inputs, plan = self._kind()
        verifying = [self._members[i] for i in inputs.rows.verifying]
        rounds, is_run, is_scored = self.rounds, False, self._scores and inputs.judged > 0
        chosen = [m.decoder.keys.rounds + m.rounds for m in verifying]
        chosen += [0] * (inputs.judged - len(chosen))

        def play(forward: Callable[[MixedStep], Tensor]) -> Tensor:
            def seen(step: MixedStep) -> Tensor:
                nonlocal is_run
                logits, is_run = forward(step), True
                return logits

            return rounds.play(inputs, seen, is_scored=is_scored, chosen=chosen)

        try:
            rounds.form(inputs).fill(inputs)
            given, is_run = self._runner.run_step(rounds.kind(inputs), play), True
            report = rounds.read(given[: len(verifying)])
            if report is not None:
                self._landings.append(Landing(verifying, report))
            self._step += 1
            self._scheduler.step += 1
            for member in verifying:
                member.rounds += 1
        except BaseException as error:
            self._is_torn = True
            if is_run and isinstance(error, Exception):
                return None
            raise
        self._land(but=0 if report is None else 1)
        return plan

    def leave(self) -> None:
        """Let plans begin again, where the requests stand."""
        self._land(but=0)
        self._leave_out()
        self._retry_at = self._scheduler.step + LONG_PATIENCE if self._is_torn else 0
        if self._is_torn:
            # What the host has read is right; how far the device got is not known.
            for member in self._members:
                keys = member.decoder.keys
                keys.are_fresh, member.seat.selections = not keys.selects, None
                self._resume(member, [])
        elif self._members:
            self._give_back()
        self.forget()

    def forget(self) -> None:
        """Let go of all requests: they have ended, or have been given back."""
        self._members, self._landings = [], []
        self._kinds.clear()

    def _give_back(self) -> None:
        """Give each request what the device has of it: its drafts, and the keys that they read."""
        members, buffers = self._members, self._runner.buffers
        seats = on_device([m.seat.number for m in members], buffers.device)
        texts = self.rounds.tokens[seats].tolist()
        drafted = self._schedule.drafted(self._step)
        if not self._k_of(members[0].decoder):
            # The gate has turned: what would be left of the rounds is not worth planned steps.
            drafted = [0] * len(members)
        kept = buffers.selected.taken(seats, self.rounds.begun[seats]) if self._k else None
        for place, (member, text, count) in enumerate(zip(members, texts, drafted, strict=True)):
            if kept is not None:
                member.seat.selections = part = ChosenPart(kept, place)
                member.decoder.keys.resume(part, member.rounds)
            self._resume(member, text[1 : count + 1])

    def _resume(self, member: Member, drafts: list[int]) -> None:
        """Let a request be planned again, with `drafts` if the keys that they read are not old."""
        name, decoder, scheduler = member.name, member.decoder, self._scheduler
        drafts = drafts if decoder.keys.are_fresh else []
        stays = scheduler.resume(name, length=decoder.length, drafted=len(drafts))
        decoder.resume(drafts[:stays], k=self._k)
        member.seat.kept = KeptRound(decoder.length - 1, len(drafts))
        if not stays:
            scheduler.wished(name, decoder.wish(scheduler.entries[name].draft_room))

    def drop(self, *, everybody: bool) -> None:
        """Leave those out from the next step on who have ended; `everybody` has: forget them."""
        self._is_thinner = True
        if everybody:
            self.forget()

    def _bound(self, entry: Entry) -> int:
        """Return the tokens that a request has at most after the step after the next one.

        One round may have ended that nobody has looked at, and another one follows it.
        """
        return entry.cached + 2 * (self._k + 1)

    def _renew(self, drafted: list[int]) -> None:
        """Plan all steps to come: requests that have so many drafts go on."""
        self._schedule = CruiseSchedule(drafted, self._k)
        self._step = 0
        self._kinds.clear()

    def _kind(self) -> tuple[StepInputs, StepPlan]:
        """Return what the next step does."""
        kind, members = self._schedule.kind(self._step), self._members
        held = self._kinds.get(kind)
        rows = self._schedule.rows(self._step) if held is None else held[0].rows
        # Asked each time: what others have recorded may serve, or has served long enough.
        rest = self.rounds.rest_of_kind(members[0].decoder.kind)
        padded = self._runner.padded(len(rows.owners), *rest)
        if held is None or held[0].padded != padded:
            self._kinds[kind] = held = step_of(
                members, rows, self._runner.buffers, k=self._k, padded=padded, scores=self._scores
            )
        return held

    @property
    def _scores(self) -> bool:
        """Whether those who verify leave scores."""
        return bool(self._k and self._members[0].decoder.keys.scored_layers)

    def _rounds_of(self, budget: RatioBudget) -> CruiseRounds:
        """Return the rounds of earlier cruises where they fit, or new ones."""
        buffers, key = self._runner.buffers, (self._k, budget)
        if any(rounds.generation != buffers.generation for rounds in self._held.values()):
            self._held.clear()
        if key not in self._held:
            self._held[key] = self.new_rounds(
                buffers,
                self._outcomes.selection,
                k=self._k,
                budget=budget,
                longest=self._longest,
            )
            if len(self._held) > MOST_HELD:
                del self._held[next(iter(self._held))]
        return self._held[key]

    def _leave_out(self) -> None:
        """Go on without those who have ended; the others keep their drafts."""
        if not self._is_thinner:
            return
        self._is_thinner = False
        drafted = self._schedule.drafted(self._step)
        kept = [
            (m, count) for m, count in zip(self._members, drafted, strict=True) if not m.has_ended()
        ]
        if len(kept) < len(self._members):
            self._members = [member for member, _ in kept]
            self._renew([count for _, count in kept])

    def _land(self, *, but: int) -> None:
        """Look at rounds that have ended, in order, but for the last ones; make room for more."""
        while len(self._landings) > but:
            # Whoever interrupts this finds everything as it was.
            lines = self._landings[0].report()
            try:
                landing = self._landings.pop(0)
                for member, line in zip(landing.members, lines, strict=True):
                    if member.has_ended():
                        continue
                    self._outcomes.land_round(member.name, line[: self._k + 1], line[self._k + 1 :])
                    if member.has_ended():
                        self._is_thinner = True
                    else:
                        self._grow(member)
            except BaseException:
                # Who was not reached yet goes through the round again, and so through later ones.
                self._is_torn = True
                self._landings.clear()
                raise
        if self._is_torn:
            return
        grown = [
            (m.seat, m.entry.table)
            for m in self._members
            if not m.has_ended() and m.seat.pages < len(m.entry.table)
        ]
        self._runner.buffers.lengthen(grown)

    def _grow(self, member: Member) -> bool:
        """Make room for a request's rounds to come; return whether its table has changed."""
        pool, sizes, entry = self._scheduler.pool, self._runner.buffers.sizes, member.entry
        bound = self._bound(entry)
        missing = pool.blocks_for(bound) - len(entry.table)
        room = sizes.pages * pool.block_size
        if self._scores:
            room = min(room, sizes.span)
        is_wide = bool(self._k) and member.decoder.keys.budget(bound) > sizes.width
        if missing > pool.free or bound > room or is_wide:
            self._is_short = True
            return False
        if missing > 0:
            entry.table.reserve(pool, bound)
        return missing > 0
