"""Rounds that go on where they are: the device draws, judges and selects, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import count

import torch
from torch import Tensor

from pillarattn.datatypes import on_device
from pillarattn.engine.batched_draws import DrawKind, draw_tokens, read_later
from pillarattn.engine.batched_selection import BatchedSelection
from pillarattn.engine.chosen_keys import ChosenKeys
from pillarattn.engine.cruise_inputs import StepForm, StepInputs, keeps_lse
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.own_noise import signed
from pillarattn.engine.step_buffers import StepBuffers
from pillarattn.kernels.mixed_attention import can_pool
from pillarattn.kernels.rounds import MOST, judge_rounds
from pillarattn.modules.budgets import RatioBudget

# Recordings name whose memory they read.
_SERIALS = count()
# Of each request that verified: what its rows gave, and the drafts that it had.
Report = Callable[[], list[list[int]]]


class CruiseRounds:
    """Where each request stands, on the device alone.

    Serves one cruise after the other while the buffers stay where they are: recordings read what
    is here.

    Args:
        buffers: the inputs of passes; requests keep their seats.
        selection: chooses the keys of coming rounds.
        k: drafts of a round.
        budget: of every request.
        longest: tokens that the model takes; None: any number. Drafts past them, which nobody will
            see, are at the last position.

    Attributes:
        base: `[seats + 1]` int64, position of each seat's newest token, which has no key yet; 0 in
            the last seat, nobody's.
        tokens: `[seats + 1, k + 1]` int64, that token and the drafts after it.
        begun: `[seats + 1]` int64, tokens that had keys when a seat's keys were chosen.
        generation: of the buffers' memory.
    """

    def __init__(
        self, buffers: StepBuffers, selection: BatchedSelection, *, k: int, budget: RatioBudget,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        self._buffers, self._selection, self.k, self.budget = buffers, selection, k, budget
        self.generation, self._serial = buffers.generation, next(_SERIALS)
        self._last = MOST if longest is None else longest - 1
        seats = buffers.sizes.seats + 1
        self.base = torch.zeros(seats, dtype=torch.int64, device=buffers.device)
        self.tokens = self.base.new_zeros(seats, k + 1)
        # Key of a seat's noise, and what a position lacks to be a place in its output.
        self._seeds, self._shifts = torch.zeros_like(self.base), torch.zeros_like(self.base)
        self.begun = torch.zeros_like(self.base)
        self._forms: dict[tuple[int, int], StepForm] = {}

    def begin(self, requests: Sequence[tuple[int, RequestDecoder]]) -> None:
        """Say where requests stand, by their seats."""
        lines = []
        for seat, own in requests:
            drafts = own.drafts
            lines.append([
                seat, own.length - 1, 1 - own.text.prompt_length,
                signed(own.request.params.seed or 0), own.keys.chosen_at, own.text.newest, *drafts,
                *[0] * (self.k - len(drafts)),
            ])  # fmt: skip
        table = on_device(lines, self.base.device)
        where = table[:, 0]
        self.base[where], self._shifts[where] = table[:, 1], table[:, 2]
        self._seeds[where], self.begun[where] = table[:, 3], table[:, 4]
        self.tokens[where] = table[:, 5:]

    @property
    def pools(self) -> bool:
        """Whether scores are pooled over all rows of a verify pass while it attends.

        So the paper's code does. Which rows stand is known afterwards: scores of single rows take
        as many times the memory.
        """
        buffers = self._buffers
        if not (self.k and keeps_lse(buffers, self.k) and self._selection.pools_rows):
            return False
        return can_pool(self.k + 1, buffers.kept.values.shape[3] // buffers.sizes.heads)

    def form(self, inputs: StepInputs) -> StepForm:
        """Return where steps of a size find their inputs."""
        size = inputs.padded, inputs.judged
        if size not in self._forms:
            self._forms[size] = StepForm(*size, self._buffers, k=self.k)
        return self._forms[size]

    def kind(self, inputs: StepInputs) -> Hashable:
        """Return what steps share that launch the same kernels; None: the host has a say in them.

        The first part is the number of rows, as in the kinds of passes.
        """
        if len(inputs.draws) > 1 or (self.k and self._selection.reads_rounds):
            return None
        return inputs.padded, *self.rest_of_kind(inputs.draws[0][0])

    def rest_of_kind(self, drawn: DrawKind | None) -> tuple[Hashable, ...]:
        """Return what makes up a kind beside the number of rows.

        Not whether anybody verifies: a step without that judges places of nobody, so that one
        recording serves both.
        """
        return "step", self._serial, drawn

    def play(
        self, inputs: StepInputs, forward: Callable[[MixedStep], Tensor], *, is_scored: bool,
        chosen: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Run a step whose form is filled: its pass, and all that comes before and after it.

        Args:
            inputs: what was filled in. Of it, only the sizes count.
            forward: runs a pass and returns its logits `[rows, V]`.
            is_scored: whether those who verify leave scores.
            chosen: of each place that is judged: how often keys were chosen before.

        Returns:
            `[judged, 2 * k + 1]` int64: what each verify pass gave, and the drafts that it had.
        """
        form = self.form(inputs)
        step = form.load(
            self._buffers, self.base, self.tokens, self.begun, scored=is_scored, pools=self.pools,
            live=inputs.live, last=self._last,
        )  # fmt: skip
        return self.advance(form, step, forward(step), draws=inputs.draws, chosen=chosen)

    def advance(
        self, form: StepForm, step: MixedStep, logits: Tensor, *,
        draws: list[tuple[DrawKind, Tensor | None]], chosen: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Take what a pass gives, and return what `play` does."""
        drawn = self._drawn(form, logits, draws)
        seats, k = form.verify_seats, self.k
        report, ends, emitted = judge_rounds(
            self.judged(form, drawn), self.tokens, self.base, self.begun,
            rows=form.verify_rows.view(form.judged, k + 1), seats=seats, real=form.real,
            draft_places=form.draft_places,
        )  # fmt: skip
        if k and form.judged:
            buffers = self._buffers
            keys = self._chosen(step, ends, emitted, chosen)
            buffers.selected.put(keys, seats, buffers.block_table, buffers.block_size)
        return report

    def judged(self, form: StepForm, drawn: Tensor) -> Tensor:
        """Return the token of each row that drafts are judged by: what was drawn."""
        return drawn

    def read(self, report: Tensor) -> Report | None:
        """Begin to copy a report to the host; None: nobody verified."""
        return read_later(report) if len(report) else None

    def _drawn(
        self, form: StepForm, logits: Tensor, draws: list[tuple[DrawKind, Tensor | None]]
    ) -> Tensor:
        """Return the token of each row, -1 where none is possible."""
        steps = self._buffers.named["positions"][: form.padded] + self._shifts[form.seats]
        seeds = self._seeds[form.seats]
        if len(draws) == 1:
            return draw_tokens(draws[0][0], logits, seeds, steps)[0]
        found = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        for kind, rows in draws:
            found[rows] = draw_tokens(kind, logits[rows], seeds[rows], steps[rows])[0]
        return found

    def _chosen(
        self, step: MixedStep, base: Tensor, emitted: Tensor, rounds: Sequence[int]
    ) -> ChosenKeys:
        """Return the keys of coming rounds, which end at `base`, by what a pass has left."""
        sizes, scores = self._buffers.sizes, {}
        most = sizes.pages * self._buffers.block_size
        if step.is_scored:
            most = sizes.span
            layers = zip(sizes.scored, step.scores, strict=True)
            rows = 1 if step.pools else None
            scores = {index: layer[: len(base), :, :rows] for index, layer in layers}
        return self._selection.choose_ahead(
            scores, lengths=base, emitted=emitted, most=most, rounds=rounds, budget=self.budget,
            widest=sizes.width, are_pooled=step.pools,
        )  # fmt: skip
