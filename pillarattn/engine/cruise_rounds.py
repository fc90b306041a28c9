"""Rounds that go on where they are: the device draws, judges and selects, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pillarattn.datatypes import on_device
from pillarattn.engine.batched_draws import draw_tokens, read_later
from pillarattn.engine.batched_selection import BatchedSelection
from pillarattn.engine.chosen_keys import ChosenKeys
from pillarattn.engine.cruise_inputs import StepInputs
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.own_noise import signed
from pillarattn.engine.step_buffers import StepBuffers
from pillarattn.modules.budgets import RatioBudget

# Of each request that verified: what its rows gave, and the drafts that it had.
Report = Callable[[], list[list[int]]]


class CruiseRounds:
    """Where each request stands, on the device alone.

    Args:
        buffers: the inputs of passes; requests keep their seats.
        selection: chooses the keys of coming rounds.
        k: drafts of a round.
        budget: of every request.

    Attributes:
        base: `[seats + 1]` int64, position of each seat's newest token, which has no key yet.
        tokens: `[seats + 1, k + 1]` int64, that token and the drafts after it.
    """

    def __init__(
        self, buffers: StepBuffers, selection: BatchedSelection, *, k: int, budget: RatioBudget
    ) -> None:
        self._buffers, self._selection, self.k, self._budget = buffers, selection, k, budget
        seats = buffers.sizes.seats + 1
        self.base = torch.zeros(seats, dtype=torch.int64, device=buffers.device)
        self.tokens = self.base.new_zeros(seats, k + 1)
        # Key of a seat's noise, and what a position lacks to be a place in its output.
        self._seeds, self._shifts = torch.zeros_like(self.base), torch.zeros_like(self.base)

    def begin(self, requests: Sequence[tuple[int, RequestDecoder]]) -> None:
        """Say where requests stand, by their seats."""
        lines = []
        for seat, own in requests:
            drafts = own.drafts
            lines.append([
                seat, own.length - 1, 1 - own.text.prompt_length,
                signed(own.request.params.seed or 0), own.text.newest, *drafts,
                *[0] * (self.k - len(drafts)),
            ])  # fmt: skip
        table = on_device(lines, self.base.device)
        where = table[:, 0]
        self.base[where], self._shifts[where] = table[:, 1], table[:, 2]
        self._seeds[where], self.tokens[where] = table[:, 3], table[:, 4:]

    def advance(
        self, inputs: StepInputs, step: MixedStep, logits: Tensor, *, most: int,
        chosen: Sequence[int],
    ) -> Report | None:  # fmt: skip
        """Take what a pass gives, and return what waits for the rounds that ended in it.

        Args:
            inputs: of the step.
            step: its pass.
            logits: `[rows, V]` of it.
            most: tokens that no request has more of.
            chosen: of those that verify: how often keys were chosen for them before.
        """
        drawn = self._drawn(inputs, logits[: inputs.live].float())
        drafts = drawn[inputs.draft_rows].clamp_min(0)
        if not len(inputs.verify_seats):
            self.tokens.view(-1).index_copy_(0, inputs.draft_places, drafts)
            return None
        seats = inputs.verify_seats
        targets = drawn[inputs.verify_rows].view(len(seats), -1)
        drafted = self.tokens[seats, 1:]
        stand = (targets[:, : self.k] == drafted).long().cumprod(dim=1).sum(dim=1)
        newest = targets.gather(1, stand.unsqueeze(1)).squeeze(1).clamp_min(0)
        emitted = stand + 1
        base = self.base[seats] + emitted
        keys = self._chosen(inputs, step, base, emitted, most, chosen) if self.k else None
        report = read_later(torch.cat([targets, drafted], dim=1))
        tokens = self.tokens.view(-1)
        tokens.index_copy_(0, inputs.draft_places, drafts)
        tokens.index_copy_(0, inputs.newest_places, newest)
        self.base.index_copy_(0, seats, base)
        if keys is not None:
            buffers = self._buffers
            buffers.selected.put(keys, seats, buffers.block_table, buffers.block_size)
        return report

    def _drawn(self, inputs: StepInputs, logits: Tensor) -> Tensor:
        """Return the token of each row, -1 where none is possible."""
        found = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        seats = inputs.seats[: inputs.live]
        steps = self._buffers.named["positions"][: inputs.live] + self._shifts[seats]
        seeds = self._seeds[seats]
        for kind, rows in inputs.draws:
            if rows is None:
                return draw_tokens(kind, logits, seeds, steps)[0]
            found[rows] = draw_tokens(kind, logits[rows], seeds[rows], steps[rows])[0]
        return found

    def _chosen(
        self, inputs: StepInputs, step: MixedStep, base: Tensor, emitted: Tensor, most: int,
        rounds: Sequence[int],
    ) -> ChosenKeys:  # fmt: skip
        """Return the keys of coming rounds, which end at `base`, by what a pass has left."""
        scores = {}
        if inputs.is_scored:
            layers = zip(self._buffers.sizes.scored, step.scores, strict=True)
            scores = {index: layer[: len(base)] for index, layer in layers}
        return self._selection.choose_ahead(
            scores, lengths=base, emitted=emitted, most=most, rounds=rounds, budget=self._budget
        )
