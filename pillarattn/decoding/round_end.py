"""How a round ends: its tokens are committed, rows stop, and the cache is cut to what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pillarattn.datatypes import RowLengths, Verdict
from pillarattn.decoding.history import History
from pillarattn.decoding.outcome import Outcome, Recorder
from pillarattn.decoding.target import Target


@dataclass
class RoundEnd:
    """Ends the rounds of one generation, whose parts it is given.

    Attributes:
        emitted: tokens that each row got in the last round.
        width: tokens a row that the last round's verify pass had; 0 after the prompt.
    """

    target: Target
    history: History
    outcome: Outcome
    recorder: Recorder
    emitted: list[int] = field(init=False)
    width: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.emitted = [0] * self.history.batch

    def most(self, k: int, verdict: Verdict) -> int:
        """Return how many tokens a row may emit in a round of k drafts.

        In lockstep the row that accepted least decides. What other rows lose is drawn anew,
        whatever it was, and so the law of the output does not change.
        """
        if not self.target.lockstep:
            return k + 1
        outcome = self.outcome
        running = [
            accepted + 1
            for row, accepted in enumerate(verdict.accepted)
            if not outcome.is_idle(row) and outcome.runs_on(row)
        ]
        return min(running, default=k + 1)

    def commit(self, chosen: dict[int, list[int]], scores: Tensor, raw: Tensor) -> None:
        """Commit the tokens of each row, and stop rows.

        Where rows share one length and the cache is handed back, this goes column by column up to
        the first one that ends a row: what follows is then padding, as in plain decoding.
        """
        outcome, history = self.outcome, self.history
        width = max(map(len, chosen.values()), default=0)
        together = self.target.lockstep and outcome.keep_padding
        step = 1 if together else max(width, 1)
        for at in range(0, max(width, 1), step):
            before, running = list(history.lengths), outcome.stopped_at.count(None)
            parts = {row: tokens[at : at + step] for row, tokens in chosen.items()}
            history.commit_rows(parts)
            if self.recorder.is_on:
                for row, part in parts.items():
                    place = slice(at, at + len(part))
                    self.recorder.keep(row, scores[row, place], raw[row, place])
            outcome.update(before)
            if outcome.stopped_at.count(None) < running:
                break

    def cut(self, before: list[int], base: Sequence[int]) -> None:
        """Cut the cache, and the records, to what is left: all but each row's newest token."""
        self.width = max(self.target.cache.lengths.host) - max(base)
        self.emitted = [new - old for new, old in zip(self.history.lengths, before, strict=True)]
        for row, length in enumerate(self.history.lengths):
            self.recorder.truncate(row, length - self.history.prompt_length)
        if self.width:
            emitted = self.emitted
            if self.target.lockstep:
                # Rows that emitted less have ended; what their cache holds is read no more.
                emitted = [max(emitted)] * self.history.batch
            kept = [n + a for n, a in zip(base, emitted, strict=True)]
            self.target.keep(RowLengths(kept, self.target.cache.lengths.device))

    def check_possible(self, stuck: list[int]) -> None:
        """Raise for rows that must go on and cannot, as sampling from their logits would.

        A row that has run ahead waits: the batch may end before plain decoding gets there.
        """
        outcome = self.outcome
        for row in stuck:
            waits = outcome.settled < self.history.lengths[row]
            if not waits and outcome.runs_on(row) and not outcome.is_idle(row):
                raise ValueError(
                    f"row {row} has no possible token after {self.history.lengths[row]}: its "
                    "processed logits are all -inf, or NaN; check the logits processors and the "
                    "model's dtype"
                )
