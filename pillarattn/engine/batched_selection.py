"""The keys of many requests' coming rounds, chosen by one call over what their passes left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import LiveLengths, RowLengths
from pillarattn.engine.chosen_keys import ChosenKeys, ChosenPart
from pillarattn.engine.paged_cache import PagedCache, RequestView
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.selector import Selector
from pillarattn.modules.text_selector import TextSelector


@dataclass(frozen=True)
class TextRow:
    """What one request's coming round is chosen by.

    Attributes:
        length: its tokens with keys.
        emitted: tokens of its verify pass, and so the rows that count.
        round_index: rounds chosen before.
        budget: its own.
        place: of its scores in those of the pass; None: the strategy reads none.
        scores: of the pass by layer, `[places, Hkv, Q, S]` each.
    """

    length: int
    emitted: int
    round_index: int
    budget: RatioBudget
    place: int | None
    scores: Mapping[int, Tensor] = field(default_factory=dict)


class BatchedSelection:
    """Asks a strategy without history once a step, whatever the number of requests.

    Args:
        selector: of the engine's strategy; each request brings its own budget.
        cache: the pool.
        device: where it is.
    """

    def __init__(self, selector: Selector, cache: PagedCache, device: torch.device) -> None:
        self._selector = TextSelector.like(selector)
        self._device = device
        self._view = RequestView(cache, device, reads_keys=False)

    @property
    def is_possible(self) -> bool:
        """Whether the strategy lets itself be asked so."""
        return self._selector.is_apart

    @property
    def reads_rounds(self) -> bool:
        """Whether the strategy asks which round of its text a row is."""
        return self._selector.strategy.needs_rounds

    @property
    def pools_rows(self) -> bool:
        """Whether the strategy asks for scores, and not for those of single rows."""
        strategy = self._selector.strategy
        return strategy.needs_scores and not strategy.needs_row_scores

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that keys are chosen for, ascending."""
        view: Any = self._view
        view.meet_layers()
        return tuple(self._selector.sparse_layers(view))

    def choose(self, rows: list[TextRow]) -> list[ChosenPart]:
        """Return the keys of each row's coming round.

        Raises:
            ValueError: layers differ in heads or windows.
        """
        places = list(range(len(rows)))
        if self._selector.scores_verify:
            places = [-1 if row.place is None else row.place for row in rows]
        # Scores stay where they are: what lies between belongs to requests that have ended.
        nobody = TextRow(1, 1, 0, rows[0].budget, None)
        lines = [nobody] * (max(places) + 1)
        for place, row in zip(places, rows, strict=True):
            lines[place] = row
        view: Any = self._view
        # Layers that were met since the last time join.
        view.set_length(0)
        view.lengths = lengths = RowLengths([r.length for r in lines], self._device)
        indices, counts = self._selector.choose_for(
            view,
            self._scores(rows[0], len(lines), lengths),
            emitted=[r.emitted for r in lines],
            rounds=[r.round_index for r in lines],
            budgets=[r.budget for r in lines],
        )
        layers, batch = tuple(self._selector.sparse_layers(view)), len(lines)
        chosen = ChosenKeys(
            layers,
            indices.view(len(layers), batch, *indices.shape[1:]),
            counts.view(len(layers), batch, -1),
            lengths.tensor,
        )
        return [ChosenPart(chosen, place) for place in places]

    def choose_ahead(
        self, scores: Mapping[int, Tensor], *, lengths: Tensor, emitted: Tensor, most: int,
        rounds: Sequence[int], budget: RatioBudget, widest: int, are_pooled: bool = False,
    ) -> ChosenKeys:  # fmt: skip
        """Return the keys of coming rounds while the device alone knows how long texts are.

        Args:
            scores: of the verify passes, by layer, `[B, Hkv, Q, S]`; empty: nobody reads any.
            lengths: `[B]` int64, tokens with keys, rejected ones left out.
            emitted: `[B]` int64, tokens of the passes.
            most: no text is longer.
            rounds: rounds chosen before.
            budget: of every text.
            widest: no budget is larger.
            are_pooled: whether scores have one row, pooled over all rows of the passes.

        Raises:
            ValueError: layers differ in heads or windows.
        """
        view: Any = self._view
        layers, batch = self.layers, len(lengths)
        view.lengths = LiveLengths([most] * batch, self._device, tensor=lengths)
        buffer = ScoreBuffer()
        if self._selector.scores_verify:
            for index, layer in scores.items():
                buffer.put(index, layer, view.lengths)
        indices, counts = self._selector.choose_ahead(
            view, buffer, emitted=emitted, rounds=rounds, budget=budget, widest=widest,
            are_pooled=are_pooled,
        )  # fmt: skip
        return ChosenKeys(
            layers, indices.view(len(layers), batch, *indices.shape[1:]),
            counts.view(len(layers), batch, -1), lengths,
        )  # fmt: skip

    def _scores(self, row: TextRow, rows: int, lengths: RowLengths) -> ScoreBuffer:
        """Return the scores of the pass that all rows come from."""
        scores = ScoreBuffer()
        if self._selector.scores_verify:
            for index, layer in row.scores.items():
                scores.put(index, layer[:rows], lengths)
        return scores
