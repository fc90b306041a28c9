"""What comes of a pass: its logits become tokens and drafts, and coming rounds get their keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor

from pillarattn.datatypes import Phase
from pillarattn.engine.batched_draws import Drawn, draw_all
from pillarattn.engine.batched_selection import BatchedSelection
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.flight import Flight
from pillarattn.engine.logprobs import token_logprobs
from pillarattn.engine.pass_logits import PassLogits
from pillarattn.engine.request import FinishReason, Request
from pillarattn.engine.scheduler import Scheduler
from pillarattn.engine.shared_prompts import SharedPrompts
from pillarattn.engine.step_plan import StepPlan

T = TypeVar("T")


class Outcomes:
    """Takes what passes and shared prompts bring, and reports it to the scheduler.

    Tokens of all requests are drawn by one call and so are their keys, where nothing but their
    logits and scores has a say; the others ask their decoders one by one. What a request raises
    ends that request alone.

    Args:
        scheduler: told of all that happens.
        requests, decoders: those that have not ended, by id.
        shared: ends of prompts that several samples begin with.
        selection: chooses the keys of many requests.

    Attributes:
        news: by request, the tokens of this step; a request that ended without any is there too.
    """

    def __init__(
        self, scheduler: Scheduler, requests: dict[str, Request],
        decoders: dict[str, RequestDecoder], shared: SharedPrompts, selection: BatchedSelection,
    ) -> None:  # fmt: skip
        self.scheduler, self.requests, self.decoders = scheduler, requests, decoders
        self.shared, self.selection = shared, selection
        self.news: dict[str, list[int]] = {}
        # Whose log probabilities are wanted, of which row on, and the tokens.
        self._wanted: list[tuple[str, int, list[int]]] = []

    def fail(self, name: str, error: Exception) -> None:
        """End a request."""
        self.requests[name].finish(FinishReason.ERROR, error)
        self.news.setdefault(name, [])

    def fork(self, name: str) -> None:
        """Give a sample its first token from the prompt that it shares."""
        self._guarded(name, partial(self._fork, name))

    def launch(self, plan: StepPlan, logits: PassLogits) -> Flight:
        """Let tokens be drawn from the logits of a pass, which lie in the order of the plan."""
        places = dict(zip(_names(plan), range(len(logits)), strict=True))
        drafts, wanted = set(plan.drafts), []
        for name, place in places.items():
            first, count = logits.spans[place]
            if count:
                phase = Phase.DRAFT if name in drafts else Phase.VERIFY
                rows = self.decoders[name].rows_to_draw(phase, first, count)
                wanted += [] if rows is None else [rows]
        draws = _attempted(lambda: draw_all(logits.rows, wanted))
        self.scheduler.launched(plan)
        for name in plan.drafts:
            self.decoders[name].pending += 1
        decoders = {name: self.decoders[name] for name in places}
        return Flight(plan, logits, places, decoders, draws)

    def land(self, flight: Flight) -> None:
        """Turn what a pass has brought into tokens and drafts, and choose coming rounds' keys."""
        plan, logits = flight.plan, flight.logits
        drawn = (_attempted(flight.draws.found) if flight.draws else None) or {}

        def is_here(name: str) -> bool:
            is_same = self.decoders.get(name) is flight.decoders[name]
            return is_same and self.requests[name].finish_reason is None

        def found(name: str) -> Tensor | Drawn:
            return drawn[name] if name in drawn else logits[flight.places[name]]

        for name in (chunk.request_id for chunk in plan.prefills if chunk.emits):
            if is_here(name):
                self.scheduler.landed(name)
                raw, row = logits[flight.places[name]], logits.spans[flight.places[name]][0]
                self._guarded(name, partial(self._first, name, raw, found(name), row))
        for name in filter(is_here, plan.drafts):
            if name in drawn:
                # A draft is not output: there is no news to look for, in the step's longest loop.
                try:
                    self._draft(name, drawn[name])
                except Exception as error:
                    self.fail(name, error)
            else:
                self._guarded(name, partial(self._draft, name, found(name)))
        verified = [name for name, _ in plan.verifies if is_here(name)]
        for name in verified:
            self.scheduler.landed(name)
            row = logits.spans[flight.places[name]][0]
            self._guarded(name, partial(self._verify, name, found(name), row))
        self._note_logprobs(logits.rows)
        self._select(verified)

    def land_round(self, name: str, targets: list[int], drafts: list[int]) -> None:
        """Turn a round that the device has gone through by itself into tokens."""
        self._guarded(name, partial(self._round, name, targets, drafts))

    def _round(self, name: str, targets: list[int], drafts: list[int]) -> None:
        # The device drafts k tokens also where fewer may be emitted: the others count for nothing.
        room = self.scheduler.entries[name].draft_room
        emitted = self.decoders[name].end_round(targets[: room + 1], drafts[:room])
        self.scheduler.cruised(name, len(emitted))

    def _select(self, names: list[str]) -> None:
        """Choose the keys of the rounds that begin after a verify pass."""
        ready = [
            name
            for name in names
            if self.requests[name].finish_reason is None and self.decoders[name].keys.must_choose
        ]
        if self.selection.is_possible:
            ready = self._select_together(ready)
        for name in ready:
            self._guarded(name, self.decoders[name].select_keys)
        for name in names:
            self.decoders[name].keys.forget_scores()

    def _select_together(self, names: list[str]) -> list[str]:
        """Choose for as many as can be, and return the others."""
        rows = {name: self.decoders[name].keys.row() for name in names}
        together = [(name, row) for name, row in rows.items() if row is not None]
        parts = None
        if together:
            parts = _attempted(lambda: self.selection.choose([row for _, row in together]))
        if parts is None:
            return names
        for (name, _), part in zip(together, parts, strict=True):
            self.decoders[name].keys.take(part)
        return [name for name in names if rows[name] is None]

    def _guarded(self, name: str, attempt: Callable[[], None]) -> None:
        """Run a request's own part; what it raises ends that request alone."""
        before = len(self.requests[name].output)
        try:
            attempt()
        except Exception as error:
            self.requests[name].finish(FinishReason.ERROR, error)
        finally:
            # Who interrupts this finds out as well.
            new = self.requests[name].output[before:]
            if new or self.requests[name].finish_reason is not None:
                self.news[name] = self.news.get(name, []) + new

    def _want_logprobs(self, name: str, row: int, tokens: list[int]) -> None:
        if self.requests[name].params.logprobs is not None:
            self._wanted.append((name, row, tokens))

    def _note_logprobs(self, logits: Tensor) -> None:
        """Give requests the log probabilities of what they have emitted, by one call for all."""
        wanted, self._wanted = self._wanted, []
        rows = [row + i for _, row, tokens in wanted for i in range(len(tokens))]
        if not rows:
            return
        top = max(self.requests[name].params.logprobs or 0 for name, *_ in wanted)
        try:
            found = iter(
                token_logprobs(logits, rows, [t for *_, own in wanted for t in own], top=top)
            )
        except Exception as error:
            for name, *_ in wanted:
                self.fail(name, error)
            return
        for name, _, tokens in wanted:
            request = self.requests[name]
            own = [next(found) for _ in tokens]
            request.logprobs += [
                one._replace(top=one.top[: request.params.logprobs]) for one in own
            ]

    def _first(self, name: str, raw: Tensor, found: Tensor | Drawn, row: int) -> None:
        decoder = self.decoders[name]
        self.shared.keep(name, raw, decoder.keys.seeds.seeds)
        self.shared.leave(name)
        self._want_logprobs(name, row, decoder.first_token(found))
        self._next_round(name)

    def _fork(self, name: str) -> None:
        decoder, shared = self.decoders[name], self.shared.of(name)
        self.shared.leave(name)
        decoder.keys.seeds.seeds.update(shared.seeds)
        decoder.keys.table = self.scheduler.entries[name].table
        self.scheduler.forked(name)
        self._want_logprobs(name, 0, decoder.first_token(shared.raw))
        self._note_logprobs(shared.raw)
        self._next_round(name)

    def _draft(self, name: str, found: Tensor | Drawn) -> None:
        if not self.decoders[name].add_draft(found):
            self.scheduler.end_draft(name)

    def _verify(self, name: str, found: Tensor | Drawn, row: int) -> None:
        decoder = self.decoders[name]
        emitted = decoder.judge(found)
        self._want_logprobs(name, row, emitted)
        self.scheduler.verified(name, len(emitted), decoder.heat)
        self._next_round(name)

    def _next_round(self, name: str) -> None:
        """Say how long a request's coming round is, and look up drafts that take no steps."""
        decoder, room = self.decoders[name], self.scheduler.entries[name].draft_room
        # Without room it has none, as it stands.
        if room and self.requests[name].finish_reason is None:
            wish = decoder.wish(room)
            if decoder.proposes:
                self.scheduler.proposed(name, decoder.propose(wish))
            else:
                self.scheduler.wished(name, wish)


def _names(plan: StepPlan) -> list[str]:
    """Return whose segments a pass has, in their order."""
    prefills = [chunk.request_id for chunk in plan.prefills]
    return [*prefills, *plan.drafts, *(name for name, _ in plan.verifies)]


def _attempted(attempt: Callable[[], T]) -> T | None:
    """Return what an attempt for many requests gives, or None if it raises.

    Each request then tries by itself, with less memory, and what it raises is its own.
    """
    try:
        return attempt()
    except Exception:
        return None
