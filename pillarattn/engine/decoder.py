"""One request's decoding: its text, its sampler, its drafts, and the keys that they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Phase, Selection
from pillarattn.decoding.drafters.ngram import NgramDrafter, look_up
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.decoding.history import History
from pillarattn.engine.block_table import BlockTable
from pillarattn.engine.packed_pass import Segment
from pillarattn.engine.paged_cache import PagedCache, RequestView
from pillarattn.engine.request import Request
from pillarattn.engine.sampling import processors_of, rule_of
from pillarattn.engine.stopping import StopCheck
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.step import StepState
from pillarattn.patch.dead_ends import DeadEnds
from pillarattn.patch.logits import ProcessorRule


class RequestDecoder:
    """Turns a request's rows of each pass into its tokens; knows nothing of other requests.

    Args:
        request: what is asked for; its output grows here.
        generator: makes its strategy and selector.
        cache: the pool.
        device: where the model is.
        stop: says where the output ends.

    Attributes:
        measures_heat: whether verify passes leave `heat`.
        heat: what the last one paid to each block.
    """

    def __init__(
        self,
        request: Request,
        generator: SelfSpeculativeGenerator,
        cache: PagedCache,
        *,
        device: torch.device,
        stop: StopCheck,
    ) -> None:
        params = request.params
        self.request, self.device, self.stop = request, device, stop
        self.k = params.k or 0
        self.history = History(
            torch.tensor([request.prompt], device=device),
            capacity=len(request.prompt) + params.max_tokens + self.k + 1,
            fill=0,
        )
        self._dead_ends = DeadEnds()
        self._process = ProcessorRule(
            processors_of(params, prompt_length=len(request.prompt)), self._dead_ends
        )
        self._rule = rule_of(params)
        self._selector = generator.new_selector()
        self._length, self._share = generator.new_draft_length(), generator.new_draft_share()
        self._s = self._selector.budget.s
        drafter = generator.new_drafter()
        self._lookup = drafter if isinstance(drafter, NgramDrafter) else None
        # Whether drafts run the model over selected keys, which somebody must then select.
        self._selects = bool(self.k) and self._lookup is None
        strategy = self._selector.strategy
        self._refreshes = strategy.refresh == "step"
        self.view = RequestView(cache, reads_keys=strategy.needs_keys or strategy.needs_values)
        seed_rows = (strategy.seed_rows or self.k + 1) if self._selects else 0
        self.seeds = StepState(Phase.PREFILL, seed_rows=seed_rows)
        self._filling = self._filled = 0
        self._selections: dict[int, Selection] = {}
        self._drafts: list[int] = []
        # What each draft was drawn from, where the rule needs it.
        self._laws: list[Tensor] = []
        self._emitted = 0
        self._scores: ScoreBuffer | None = None
        self.measures_heat = False
        self.heat: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        """Committed tokens; the newest has no keys yet."""
        return self.history.lengths[0]

    @property
    def fresh(self) -> int:
        """Rows at the prompt's end that it must compute itself: for logits, and to choose keys."""
        return max(1, self.seeds.seed_rows)

    def forget_drafts(self) -> None:
        """Start the round again; the next draft is the first one."""
        self._drafts, self._laws = [], []

    def prefill(self, table: BlockTable, start: int, tokens: int, *, emits: bool) -> Segment:
        """Return the rows of a chunk of the text."""
        ids = self.history.ids[0, start : start + tokens].tolist()
        segment = self._segment(Phase.VERIFY, ids, start, table)
        segment.keep = 1 if emits else 0
        if start not in (self._filled, self._filling):
            # It begins again, dropped half-way, or goes on behind pages that it found.
            self.seeds.seeds.clear()
        self._filling, self._filled = start, start + tokens
        if self.seeds.seed_rows and start < len(self.request.prompt) and not self._emitted:
            segment.seeds = self.seeds
        return segment

    def draft_row(self, table: BlockTable) -> Segment:
        """Return the row of the round's next draft: its newest token, over the selected keys."""
        newest = self._drafts[-1] if self._drafts else self._last()
        at = self.length - 1 + len(self._drafts)
        segment = self._segment(Phase.DRAFT, [newest], at, table)
        segment.keep = 1
        segment.selections = self._selections
        if self._refreshes and self._selections:
            segment.selector, segment.emitted = self._selector, self._emitted
        return segment

    def verify_rows(self, table: BlockTable) -> Segment:
        """Return the rows of a verify pass: the newest token and the drafts."""
        tokens = [self._last(), *self._drafts]
        segment = self._segment(Phase.VERIFY, tokens, self.length - 1, table)
        segment.keep = len(tokens)
        self._scores = ScoreBuffer()
        if self._selects and self._selector.scores_verify:
            segment.scores = self._scores
            segment.scored_layers = frozenset(self._sparse_layers())
        return segment

    def first_token(self, raw: Tensor) -> list[int]:
        """Take the token after the prompt from `raw` `[1, V]`; choose the first round's keys."""
        tokens = self._judge([], raw)
        self.view.set_length(len(self.request.prompt))
        ready = all(i in self.seeds.seeds for i in self._sparse_layers())
        if self._selects and ready and self.request.finish_reason is None:
            view: Any = self.view
            view.reads_keys, kept = True, view.reads_keys
            self._selections = self._selector.seed(view, self.seeds.seeds, tokens=self._tokens())
            view.reads_keys = kept
        # Megabytes a request, which nobody reads again.
        self.seeds.seeds.clear()
        self._emitted = len(tokens)
        return tokens

    @property
    def in_part(self) -> bool:
        """Whether its drafts can do without keys that are on the host."""
        return self._selects and not self._refreshes

    @property
    def proposes(self) -> bool:
        """Whether drafts come all at once, from the text."""
        return self._lookup is not None

    def wish(self, room: int) -> int:
        """Return how many of at most `room` drafts the coming round should have."""
        return min(room, self._length.choose(room)) if room else 0

    def propose(self, room: int) -> int:
        """Look up at most `room` drafts for the coming round; return how many there are."""
        assert self._lookup is not None
        self.forget_drafts()
        if room > 0:
            tokens, found = look_up(
                self.history.ids[:, : self.length], [0], [self.length], k=room,
                longest=self._lookup.max_ngram, shortest=self._lookup.min_ngram,
            )  # fmt: skip
            for at, token in enumerate(tokens[0].tolist() if bool(found) else []):
                self.history.sketch(at, tokens[:, at])
                self._drafts.append(token)
        return len(self._drafts)

    def add_draft(self, raw: Tensor) -> bool:
        """Draw the round's next draft from `raw` `[1, V]`; return whether the round drafts on."""
        at = len(self._drafts)
        logits = self._process(self.history, [self.length + at], raw.unsqueeze(0))
        drawn, law = self._rule.draw(logits[:, 0], [self.length + at - len(self.request.prompt)])
        self.history.sketch(at, drawn)
        self._drafts.append(int(drawn))
        if law is not None:
            self._laws.append(law)
        sure = self._length.goes_on(logits[:, 0])
        return sure is None or bool(sure)

    def judge(self, raw: Tensor) -> list[int]:
        """Emit what the verify pass's `raw` `[rows, V]` leaves of the drafts, and one token more.

        Raises:
            Exception: what a logits processor raised on a text that was reached.
            ValueError: no token is possible.
        """
        request, drafts = self.request, self._drafts
        before = len(request.output)
        tokens = self._judge(drafts, raw)
        request.rounds += 1
        request.drafted += len(drafts)
        kept = min(self._accepted, len(request.output) - before)
        request.accepted += kept
        for policy in (self._length, self._share):
            policy.observe([len(drafts)], [kept])
        self.forget_drafts()
        self._emitted = len(tokens)
        self.view.set_length(self.length - 1)
        self.heat = self._measure() if self.measures_heat else ()
        if self._selects and request.finish_reason is None and self._scores is not None:
            view: Any = self.view
            s = self._share.choose(self._s)
            if s != self._selector.budget.s:
                self._selector.budget = replace(self._selector.budget, s=s)
            self._selections = self._selector.select(
                view, self._scores, emitted=[len(tokens)], tokens=self._tokens()
            )
        self._scores = None
        return tokens

    def _measure(self) -> tuple[float, ...]:
        """Return what the rows that stand paid to each block, as a share; () if nobody scored."""
        layers = [i for i in self._sparse_layers() if self._scores and i in self._scores]
        if not layers or self._scores is None:
            return ()
        end, size = self.length - 1, self.view.cache.block_size
        rows = torch.tensor([max(1, self._emitted)], device=self.device)
        paid = torch.zeros(-(-end // size) * size, device=self.device)
        for index in layers:
            paid[:end] += self._scores.pool([index], rows=rows, end=end).sum(dim=(0, 1))
        blocks = paid.view(-1, size).sum(dim=1)
        return tuple((blocks / blocks.sum()).tolist())

    def _tokens(self) -> torch.Tensor | None:
        """Return the tokens by position of the cache, for a strategy that looks at them."""
        if not self._selector.strategy.needs_tokens:
            return None
        return self.history.at_positions(self.view.lengths)

    def _judge(self, drafts: list[int], raw: Tensor) -> list[int]:
        """Commit tokens one by one, up to an end, an error or the last accepted one."""
        history, before = self.history, self.length
        logits = self._process(history, [before], raw.unsqueeze(0))
        draft = Draft(
            torch.tensor([drafts], dtype=torch.int64, device=raw.device),
            torch.stack(self._laws, dim=1) if self._laws and drafts else None,
        )
        verdict = self._rule.judge(draft, logits, [before - len(self.request.prompt)])
        self._accepted = verdict.accepted[0]
        chosen = [*drafts[: self._accepted], int(verdict.next_tokens)]
        emitted: list[int] = []
        for token in chosen:
            if token < 0:
                raise ValueError(
                    f"no token is possible after {self.length} tokens: the processed logits are "
                    "all -inf, or NaN; check the logits processors and the model's dtype"
                )
            history.commit(0, [token])
            self._dead_ends.raise_if_reached(history, self.length - 1)
            self.request.output.append(token)
            emitted.append(token)
            reason = self.stop(self.request)
            if reason is not None:
                self.request.finish(reason)
                break
        return emitted

    def _sparse_layers(self) -> list[int]:
        view: Any = self.view
        return self._selector.sparse_layers(view)

    def _last(self) -> int:
        return int(self.history.ids[0, self.length - 1])

    def _segment(self, phase: Phase, tokens: list[int], start: int, table: BlockTable) -> Segment:
        holes = phase is Phase.DRAFT and bool(table.on_host)
        slots = self.view.place(table, self.device, holes=holes)[: start + len(tokens)]
        return Segment(
            self.request.id, phase, tokens, start, self.view, slots, holes=holes, table=table
        )
