"""Counters of one generation: what was drafted, accepted and read, and how long it took."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RowRound:
    """One row's round: where it started (in tokens), what came of it, what its drafts read."""

    row: int
    start: int
    drafted: int
    accepted: int
    emitted: int
    draft_steps: int
    keys_read: float
    keys_full: float


@dataclass
class GenerationStats:
    """Statistics of one `generate` call, over all rows; rows that have ended are not counted.

    Attributes:
        rounds: draft-verify rounds, counted once for each row that took part.
        drafted: draft tokens offered to verification.
        accepted: draft tokens that verification accepted and that were kept.
        emitted: tokens that rounds emitted; the prompt phase emits one more a row.
        accepted_per_round: one list a row, its accepted drafts in each round.
        drafted_by_position: rounds that drafted position j (0-based).
        accepted_by_position: rounds that accepted position j.
        keys_read: keys attended, a mean over layers and KV heads, summed over draft steps.
        keys_full: what full attention would have attended in the same steps.
        draft_steps: draft forwards of the target, once for each row that took part.
        plain_rounds: those of the rounds that drafted nothing.
        decisions: what the cost gate chose, where that changed: `round`, `length`, `k`, `s`,
            `reason`, and the tokens a second of one sequence that it expected of that choice and
            of plain decoding; empty where k is a number.
        prefill_seconds, draft_seconds, verify_seconds, select_seconds, accept_seconds: host time
            of each phase.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_round: list[list[int]] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    keys_read: float = 0.0
    keys_full: float = 0.0
    draft_steps: int = 0
    plain_rounds: int = 0
    decisions: list[dict[str, Any]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    select_seconds: float = 0.0
    accept_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted, 0..1; drafts after a rejection count as drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted per round (the paper reports 6.16 of 8)."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, the recovered or bonus token included."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds that accepted position j, of those that drafted it."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    @property
    def keys_read_per_draft_step(self) -> float:
        """Keys that one row attends in one draft step, a mean over layers and KV heads."""
        return self.keys_read / self.draft_steps if self.draft_steps else 0.0

    @property
    def keys_full_per_draft_step(self) -> float:
        """Keys that full attention would attend in the same step."""
        return self.keys_full / self.draft_steps if self.draft_steps else 0.0

    def count(self, rounds: list[RowRound], *, ends: list[int], k: int) -> None:
        """Count rounds, as far as their tokens were kept: row b's output ends at `ends[b]` tokens.

        A rule that looks at the whole batch may end a row before where it has got to; what the row
        did after that is in no count.
        """
        self.accepted_per_round = [[] for _ in ends]
        self.drafted_by_position = [0] * k
        self.accepted_by_position = [0] * k
        for one in rounds:
            emitted = min(one.emitted, ends[one.row] - one.start)
            if emitted <= 0:
                continue
            accepted = min(one.accepted, emitted)
            self.rounds += 1
            self.plain_rounds += not one.drafted
            self.drafted += one.drafted
            self.draft_steps += one.draft_steps
            self.accepted += accepted
            self.emitted += emitted
            self.keys_read += one.keys_read
            self.keys_full += one.keys_full
            self.accepted_per_round[one.row].append(accepted)
            for position in range(one.drafted):
                self.drafted_by_position[position] += 1
                self.accepted_by_position[position] += position < accepted

    def to_dict(self) -> dict[str, Any]:
        """Return counters and derived figures as plain values."""
        derived = (
            "acceptance_rate",
            "mean_accepted",
            "acceptance_length",
            "acceptance_by_position",
            "keys_read_per_draft_step",
            "keys_full_per_draft_step",
        )
        return {**copy.deepcopy(vars(self)), **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.accepted} of {self.drafted} drafts accepted "
            f"({self.acceptance_rate:.1%}), {self.acceptance_length:.2f} tokens a round, "
            f"{self.keys_read_per_draft_step:.0f} of {self.keys_full_per_draft_step:.0f} keys read "
            "per draft step"
        )
