"""The loop: prefill, then rounds of draft, verify, accept, roll back and select."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pillarattn.datatypes import (
    Draft,
    Generation,
    HostCopy,
    Phase,
    Selection,
    Verdict,
)
from pillarattn.decoding.acceptance import AcceptanceRule
from pillarattn.decoding.cost_gate import Gate, Pace, RoundClock
from pillarattn.decoding.draft_length import ConstantLength, DraftLength
from pillarattn.decoding.draft_share import ConstantShare, DraftShare
from pillarattn.decoding.drafters import Drafter, DraftRequest
from pillarattn.decoding.history import History
from pillarattn.decoding.keys_attended import keys_attended
from pillarattn.decoding.outcome import Outcome, Recorder
from pillarattn.decoding.round_end import RoundEnd
from pillarattn.decoding.stats import GenerationStats, RowRound
from pillarattn.decoding.target import LogitsRule, Target
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.selector import Selector
from pillarattn.modules.step import StepState


@dataclass
class DecodingRun:
    """One generation: its parts, and the keys that the next round's drafts read.

    Attributes:
        k: tokens to draft per round at most; 0 is plain decoding.
        draft_length: says how many of the k a round drafts.
        draft_share: says what share of the context its drafts read.
        gate: chooses both, or plain decoding, round by round; None: k and s hold throughout.
        seed_rows: prompt rows that choose the first round's keys; 0 drafts it with all keys.
        row_limit: see `kernels.verify_attention`.
        synchronise: wait for the device at the ends of phases, so that their times are true on a
            GPU too; slower.
    """

    target: Target
    drafter: Drafter
    rule: AcceptanceRule
    process: LogitsRule
    selector: Selector
    history: History
    outcome: Outcome
    recorder: Recorder
    stats: GenerationStats
    k: int
    seed_rows: int
    row_limit: int | None = None
    draft_length: DraftLength = field(default_factory=ConstantLength)
    draft_share: DraftShare = field(default_factory=ConstantShare)
    gate: Gate | None = None
    synchronise: bool = False

    def __post_init__(self) -> None:
        self.vocabulary: int | None = None
        self._s = self.selector.budget.s
        self.selections: dict[int, Selection] = {}
        self.end = RoundEnd(self.target, self.history, self.outcome, self.recorder)
        self.rounds: list[RowRound] = []
        self.pace: Pace | None = None
        if self.gate is not None and self.k:
            self.pace = Pace(
                self.gate,
                RoundClock(self.history.ids.device),
                selects_keys=self.selects_keys,
                needs_scores=self.selector.scores_verify,
                s=self._s,
            )

    def run(self) -> Generation:
        """Decode every row to its end."""
        try:
            self.start()
            while not self.outcome.is_complete:
                draft = self.draft()
                verdict, scores, raw, buffer = self.verify(draft)
                with self._timed("accept_seconds"):
                    self.accept(draft, verdict, scores, raw)
                self.select(buffer)
        finally:
            ends = [
                length if at is None else at
                for length, at in zip(self.history.lengths, self.outcome.stopped_at, strict=True)
            ]
            self.stats.count(self.rounds, ends=ends, k=self.k)
            if self.pace is not None:
                self.stats.decisions = self.pace.to_list()
        sequences = self.outcome.sequences()
        new = sequences.shape[1] - self.history.prompt_length
        return Generation(
            sequences, self.recorder.scores_so_far(new), self.recorder.logits_so_far(new)
        )

    @property
    def selects_keys(self) -> bool:
        """Whether drafts read selected keys, and so verification must score them."""
        return self.k > 0 and self.drafter.needs_selections

    def start(self) -> None:
        """Run the prompt, emit each row's first token and choose the keys of the first round."""
        step = StepState(Phase.PREFILL, seed_rows=self.seed_rows if self.selects_keys else 0)
        if self.k:
            self.drafter.attach(self.target)
        with self._timed("prefill_seconds"):
            raw = self.target.prefill(step)
            logits = self.process(self.history, self.history.lengths, raw.unsqueeze(1))[:, 0]
            nothing = Draft(self.history.ids.new_empty(self.history.batch, 0))
            verdict = self.rule.judge(nothing, logits.unsqueeze(1), [0] * self.history.batch)
        self.vocabulary = raw.shape[-1]
        before = list(self.history.lengths)
        tokens = verdict.next_tokens.tolist()
        self.end.check_possible([row for row, token in enumerate(tokens) if token < 0])
        self.history.commit_rows({row: [token] for row, token in enumerate(tokens)})
        for row in range(len(tokens)):
            self.recorder.keep(row, logits[row : row + 1], raw[row : row + 1])
        self.outcome.update(before)
        self.end.cut(before, self.target.cache.lengths.host)
        sparse = self.selector.sparse_layers(self.target.cache)
        # A layer whose keys are made anew in each pass has left nothing to score: its first round
        # reads them all.
        seeded = sparse and step.seed_rows and all(index in step.seeds for index in sparse)
        seeded = bool(seeded) and not self.outcome.is_complete
        selects = False
        if self.pace is not None and not self.outcome.is_complete:
            selects = self.pace.begin(self._place, seeded=seeded) and bool(sparse)
            # Plain rounds read all keys.
            seeded = seeded and self.pace.k > 0
        if seeded:
            with self._timed("select_seconds"):
                self.selections = self.selector.seed(
                    self.target.cache, step.seeds, tokens=self._tokens()
                )
        if self.pace is not None:
            self.pace.clock.start()
            if selects:
                self._choose_keys(ScoreBuffer(), s=self.pace.s)

    def draft(self) -> Draft:
        """Draft up to k tokens a row over the selected keys."""
        active = [row for row in range(self.history.batch) if not self.outcome.is_idle(row)]
        room = max(self.outcome.max_length - self.history.lengths[row] for row in active)
        k = max(0, min(self.k if self.pace is None else self.pace.k, room - 1))
        self.asked = k
        self._read: dict[int, Selection] = {}
        k = min(k, self.draft_length.choose(k)) if k else 0
        if k == 0:
            return Draft(self.history.ids.new_empty(self.history.batch, 0))
        step = StepState(Phase.DRAFT, selections=dict(self.selections))
        if self.selector.strategy.refresh == "step" and self.selections:
            base, emitted, cache = self.target.cache.lengths, self.end.emitted, self.target.cache
            step.refresh = lambda layer, *query: self.selector.refresh(
                base, emitted, cache.layers[layer], *query
            )
        clock = nullcontext() if self.pace is None else self.pace.clock.drafting()
        with self._timed("draft_seconds"), clock:
            draft = self.drafter.draft(
                DraftRequest(
                    self.target, self.history, self.rule, self.process, step, k,
                    idle=frozenset(range(self.history.batch)) - set(active),
                    length=self.draft_length, vocabulary=self.vocabulary,
                )
            )  # fmt: skip
        self._read = step.selections
        return draft

    def verify(self, draft: Draft) -> tuple[Verdict, Tensor, Tensor, ScoreBuffer]:
        """Run the newest token and the draft through full attention and judge the draft."""
        buffer = ScoreBuffer()
        step = StepState(Phase.VERIFY, row_limit=self.row_limit)
        collects = self.pace is None or self.pace.collects
        self.scored = collects and self.selects_keys and self.selector.scores_verify
        if self.scored:
            step.scores = buffer
            step.scored_layers = frozenset(self.selector.sparse_layers(self.target.cache))
        history = self.history
        self._pad_finished(draft)
        for i in range(draft.k):
            history.sketch(i, draft.tokens[:, i])
        with self._timed("verify_seconds"):
            tokens = torch.cat([history.last_tokens(), draft.tokens], dim=1)
            raw = self.target.forward(tokens, step)
            self.width = getattr(self.target, "block_width", tokens.shape[1])
            logits = self.process(history, history.lengths, raw)
            steps = [n - history.prompt_length for n in history.lengths]
            verdict = self.rule.judge(draft, logits, steps)
            self._following = HostCopy(verdict.next_tokens)
            begin = getattr(self.target, "forward_ahead", None)
            if begin is not None and self._plain_follows(draft):
                # The device goes on while the host looks at the verdict.
                step = StepState(Phase.VERIFY, row_limit=self.row_limit)
                begin(verdict.next_tokens.clamp_min(0), step)
        return verdict, logits, raw, buffer

    def _plain_follows(self, draft: Draft) -> bool:
        """Whether one more plain round is to come, for the rows that this one leaves."""
        outcome, lengths = self.outcome, self.history.lengths
        if draft.k or self.synchronise:
            return False
        is_plain = self.k == 0 if self.pace is None else self.pace.stays_plain
        # A row that has ended and is padded would have another token.
        return is_plain and all(
            outcome.is_idle(row) or (outcome.runs_on(row) and lengths[row] + 1 < outcome.max_length)
            for row in range(self.history.batch)
        )

    def accept(self, draft: Draft, verdict: Verdict, scores: Tensor, raw: Tensor) -> None:
        """Commit what was accepted, stop rows that end, and roll the cache back to what is left."""
        history, outcome = self.history, self.outcome
        before = list(history.lengths)
        proposed = draft.tokens.tolist() if draft.k else [[]] * history.batch
        following = self._following.tolist()
        width = self.end.most(draft.k, verdict)
        stuck: list[int] = []
        chosen: dict[int, list[int]] = {}
        for row in range(history.batch):
            if outcome.is_idle(row):
                continue
            accepted = verdict.accepted[row]
            tokens = [*proposed[row][:accepted], following[row]]
            if not outcome.runs_on(row):
                tokens = [outcome.stop.pad_token] * (draft.k + 1)
            tokens = tokens[: min(width, outcome.max_length - before[row])]
            if tokens[-1] < 0:
                # An error, unless the row ends with the drafts before it.
                stuck.append(row)
                tokens.pop()
            chosen[row] = tokens
        counted = [outcome.stopped_at[row] is None for row in range(history.batch)]
        self.end.commit(chosen, scores, raw)
        base = [n - draft.k - 1 for n in self.target.cache.lengths.host]
        # Counted here, where the verdict has been waited for already.
        keys = keys_attended(self.target.cache, base, self._read, draft.passes)
        drafted, steps = draft.proposed(), len(draft.passes)
        self.end.cut(before, base)
        if any(n != 1 and not outcome.is_idle(row) for row, n in enumerate(self.end.emitted)):
            # A row that waits, or was cut back, runs another pass than the one begun ahead.
            getattr(self.target, "forget_ahead", lambda: None)()
        self.end.check_possible(stuck)
        # In lockstep a round may end before what was accepted does; the rest was not emitted.
        kept = list(map(min, verdict.accepted, self.end.emitted))
        self.rounds.extend(
            RowRound(
                row,
                before[row],
                drafted[row],
                kept[row],
                emitted,
                steps,
                *keys[row],
            )
            for row, emitted in enumerate(self.end.emitted)
            if counted[row]
        )
        seen = [row for row in range(history.batch) if counted[row]]
        for policy in (self.draft_length, self.draft_share):
            policy.observe([drafted[r] for r in seen], [kept[r] for r in seen])
        if self.pace is not None:
            settled = getattr(self.target, "take_settled", lambda: True)()
            self.pace.finish_round(
                self.asked, max(base), [kept[r] for r in seen], settled=settled, width=self.width
            )

    def select(self, buffer: ScoreBuffer) -> None:
        """Choose the keys of the next round from what the verify pass saw, if it is to draft."""
        if self.outcome.is_complete:
            return
        if self.pace is not None:
            if self.pace.advance(self._place, scored=self.scored):
                self._choose_keys(buffer, s=self.pace.s)
        elif self.selects_keys:
            self._choose_keys(buffer, s=self.draft_share.choose(self._s))

    def _choose_keys(self, buffer: ScoreBuffer, *, s: float) -> None:
        rows = None
        if self.selector.all_rows:
            rows = [self.end.width] * self.history.batch
        if s != self.selector.budget.s:
            self.selector.budget = replace(self.selector.budget, s=s)
        with self._timed("select_seconds"):
            self.selections = self.selector.select(
                self.target.cache,
                buffer,
                emitted=self.end.emitted,
                rows=rows,
                tokens=self._tokens(),
            )

    def _place(self) -> tuple[int, int]:
        """Return the tokens in the longest row's cache, and how many a row may emit at most."""
        outcome = self.outcome
        lengths = [n for row, n in enumerate(self.history.lengths) if not outcome.is_idle(row)]
        room = outcome.max_length - min(lengths, default=outcome.max_length)
        return self.target.cache.lengths.max, max(room, 1)

    def _tokens(self) -> Tensor | None:
        """Return the tokens by position of the cache, for a strategy that looks at them."""
        if not self.selector.strategy.needs_tokens:
            return None
        return self.history.at_positions(self.target.cache.lengths)

    def _pad_finished(self, draft: Draft) -> None:
        for row in range(self.history.batch):
            if not self.outcome.runs_on(row):
                draft.tokens[row] = self.outcome.stop.pad_token

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._wait()
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            setattr(self.stats, name, getattr(self.stats, name) + time.perf_counter() - begun)

    def _wait(self) -> None:
        device = self.history.ids.device
        if self.synchronise and device.type == "cuda":
            torch.cuda.synchronize(device)
