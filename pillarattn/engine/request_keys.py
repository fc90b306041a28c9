"""The keys that one request's drafts read, and what its passes must leave for choosing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase, Selection, on_device
from pillarattn.decoding.draft_share import ConstantShare, DraftShare
from pillarattn.engine.batched_selection import TextRow
from pillarattn.engine.block_table import BlockTable
from pillarattn.engine.chosen_keys import ChosenPart
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.paged_cache import PagedCache, RequestView
from pillarattn.engine.request_scores import RequestScores
from pillarattn.engine.request_text import RequestText
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.selector import Selector
from pillarattn.modules.step import StepState


class RequestKeys:
    """Chooses the keys of a request's rounds, or takes those that were chosen for many requests.

    Args:
        cache: the pool.
        selector: the request's own.
        share: says what share of the context each round reads.
        selects: whether drafts run the model over selected keys, which somebody must then select.
        k: drafts of a round at most.
        device: where the pool is.

    Attributes:
        view: the request's part of the pool.
        seeds: the prompt's last queries, which choose the first round's keys.
        refreshes: whether each draft step chooses anew.
        are_fresh: whether the last pass left what the coming round's keys are chosen by.
        chosen_at: tokens with keys when `selections` were chosen.
        table: the request's blocks; set with each pass.
    """

    def __init__(
        self, cache: PagedCache, selector: Selector, share: DraftShare, *, selects: bool, k: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        strategy = selector.strategy
        self.selects, self.device = selects, device
        self.refreshes = strategy.refresh == "step"
        reads_keys = strategy.needs_keys or strategy.needs_values
        self.view = RequestView(cache, device, reads_keys=reads_keys)
        seed_rows = (strategy.seed_rows or k + 1) if selects else 0
        self.seeds = StepState(Phase.PREFILL, seed_rows=seed_rows)
        self._selector, self._share, self._s = selector, share, selector.budget.s
        self._filling = self._filled = 0
        self.selections: Mapping[int, Selection] = {}
        self.are_fresh, self.chosen_at = True, 0
        self.table = BlockTable()
        self._layers: frozenset[int] = frozenset()
        self._scores: RequestScores | None = None
        # Of the round that begins: tokens with keys, and those that the round before emitted.
        self._length = self._emitted = 0

    def read_prompt(self, segment: Segment, *, fresh: bool) -> None:
        """Let a chunk of a prompt leave its last queries; `fresh` if nobody has chosen by them."""
        start = segment.start
        if start not in (self._filled, self._filling):
            # It begins again, dropped half-way, or goes on behind pages that it found.
            self.seeds.seeds.clear()
        self._filling, self._filled = start, segment.length
        if self.seeds.seed_rows and fresh:
            segment.seeds = self.seeds

    def read_draft(self, segment: Segment) -> None:
        """Let a draft's row read the selected keys."""
        segment.selections, segment.tail_start = self.selections, self._length
        if self.refreshes and self.selections:
            segment.selector, segment.emitted = self._selector, self._emitted

    @property
    def must_choose(self) -> bool:
        """Whether a verify pass has left what coming drafts are to be chosen by."""
        return self.selects and self.are_fresh

    def read_verify(self, segment: Segment, *, drafts: bool = True) -> None:
        """Let a verify pass leave its scores, if `drafts` may follow."""
        self.are_fresh = drafts or not self.selects
        if not (self.selects and drafts):
            return
        self._scores = RequestScores()
        if self._selector.scores_verify:
            segment.scores, segment.scored_layers = self._scores, self.scored_layers
            # What is added up from round to round must mean the same in each.
            segment.exact = self._selector.strategy.keeps_history

    def seed(self, text: RequestText, *, emitted: int) -> None:
        """Choose the first round's keys, if the prompt's last queries are known, and forget them.

        Args:
            text: its newest token has no keys yet.
            emitted: tokens of the step.
        """
        self._begin(text.length - 1, emitted)
        view: Any = self.view
        view.set_length(self._length)
        self.chosen_at = self._length
        self._layers = frozenset(self._selector.sparse_layers(view))
        if self.selects and all(i in self.seeds.seeds for i in self._layers):
            view.reads_keys, kept = True, view.reads_keys
            view.place(self.table)
            self.selections = self._selector.seed(view, self.seeds.seeds, tokens=self._tokens(text))
            view.reads_keys = kept
        self.forget_seeds()

    def forget_seeds(self) -> None:
        """Drop the prompt's last queries: megabytes a request, which nobody reads again."""
        self.seeds.seeds.clear()

    def end_round(self, text: RequestText, *, drafted: int, kept: int, emitted: int) -> None:
        """Say how a round went; the keys of the next one are still to be chosen."""
        self._begin(text.length - 1, emitted)
        if not self.selects:
            return
        self._share.observe([drafted], [kept])
        s = self._share.choose(self._s)
        if s != self._selector.budget.s:
            self._selector.budget = replace(self._selector.budget, s=s)

    def select(self, text: RequestText) -> None:
        """Choose the coming round's keys from the last verify pass, by the request's own call."""
        assert self._scores is not None
        view: Any = self.view
        if view.reads_keys:
            view.place(self.table)
        view.set_length(self._length)
        self.chosen_at = self._length
        self.selections = self._selector.select(
            view, self._scores, emitted=[self._emitted], tokens=self._tokens(text)
        )

    def row(self) -> TextRow | None:
        """Return what choosing for many requests must know of this one; None: it has no scores."""
        place = None if self._scores is None else self._scores.place
        if self._selector.scores_verify and place is None:
            return None
        shared = {} if self._scores is None else self._scores.shared
        return TextRow(
            self._length, self._emitted, self._selector.round_index, self._selector.budget, place,
            shared,
        )  # fmt: skip

    def take(self, part: ChosenPart) -> None:
        """Take keys that were chosen for many requests."""
        self.selections, self.chosen_at = part, self._length
        self._selector.round_index += 1

    @property
    def is_constant(self) -> bool:
        """Whether each round reads the same share, chosen after its verify pass."""
        return type(self._share) is ConstantShare and not self.refreshes

    @property
    def budget(self) -> RatioBudget:
        """What its rounds may read."""
        return self._selector.budget

    @property
    def rounds(self) -> int:
        """Rounds chosen so far."""
        return self._selector.round_index

    @property
    def scored_layers(self) -> frozenset[int]:
        """Layers whose scores a verify pass leaves."""
        is_scored = self.selects and self._selector.scores_verify
        return self._sparse_layers() if is_scored else frozenset()

    def resume(self, part: ChosenPart, rounds: int) -> None:
        """Go on with keys that the device has chosen by itself, so many rounds after the last."""
        self.selections = part
        if rounds:
            self.chosen_at, self.are_fresh = self._length, True
        self._selector.round_index += rounds

    def detach(self) -> None:
        """Let go of what is held for others: this request may wait for long."""
        if isinstance(self.selections, ChosenPart):
            self.selections = self.selections.apart()

    def heat(self) -> tuple[float, ...]:
        """Return what the rows that stand paid to each block, as a share; () if nobody scored."""
        scores = self._scores
        layers = [] if scores is None else [i for i in self._layers if i in scores]
        if not layers or scores is None:
            return ()
        end, size = self._length, self.view.cache.block_size
        rows = on_device([max(1, self._emitted)], self.device)
        paid = torch.zeros(-(-end // size) * size, device=self.device)
        of_heads: dict[int, list[int]] = {}
        for index in sorted(layers):
            of_heads.setdefault(self.view.cache.layers[index].kv_heads, []).append(index)
        for alike in of_heads.values():
            paid[:end] += scores.pool(alike, rows=rows, end=end).sum(dim=(0, 1))
        blocks = paid.view(-1, size).sum(dim=1)
        return tuple((blocks / blocks.sum()).tolist())

    def forget_scores(self) -> None:
        """Drop the scores, which the next pass may overwrite."""
        self._scores = None

    def _begin(self, length: int, emitted: int) -> None:
        self._length, self._emitted = length, emitted

    def _sparse_layers(self) -> frozenset[int]:
        if not self._layers:
            # It came without a first token of its own, as a resumed one does.
            view: Any = self.view
            view.set_length(self._length)
            self._layers = frozenset(self._selector.sparse_layers(view))
        return self._layers

    def _tokens(self, text: RequestText) -> Tensor | None:
        """Return the tokens by position, for a strategy that looks at them."""
        if not self._selector.strategy.needs_tokens:
            return None
        return text.ids[:, : text.length]
