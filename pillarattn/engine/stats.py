"""Counters of an engine since its start or its last `reset_stats`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pillarattn.engine.request import Request
from pillarattn.engine.step_plan import StepPlan


@dataclass
class EngineStats:
    """What an engine has done.

    Attributes:
        steps: forward passes.
        draft_rows, verify_rows, prefill_rows: rows of them, by phase.
        idle: request-steps spent waiting for a turn to verify, or for a pass that runs.
        most_rows: draft and verify rows of the largest step.
        rounds: verify passes of single requests.
        drafted, accepted: drafts of them.
        emitted: new tokens.
        finished: requests that ended, by reason.
        interrupted: times that a request lost its drafts because it stopped or was dropped.
        cooled: blocks that left while their requests drafted on; `blocks_out` has them too.
        blocks_out, blocks_in, blocks_copied: blocks moved to the host, back, and for a fork.
        forks: samples that took a prompt which was there already.
        shared_tokens: prompt tokens that were not computed, since a page of them was found.
    """

    steps: int = 0
    draft_rows: int = 0
    verify_rows: int = 0
    prefill_rows: int = 0
    idle: int = 0
    most_rows: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    interrupted: int = 0
    cooled: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    blocks_copied: int = 0
    forks: int = 0
    shared_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0..1; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted per round."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def rows_per_step(self) -> float:
        """Draft and verify rows of an average step."""
        return (self.draft_rows + self.verify_rows) / self.steps if self.steps else 0.0

    def planned(self, plan: StepPlan) -> None:
        """Count what a plan did before its forward pass."""
        self.interrupted += len(plan.interrupted)
        self.forks += len(plan.forks)
        self.cooled += plan.cooled
        self.shared_tokens += sum(tokens for _, tokens in plan.shared)
        for move in plan.moves:
            name = {"out": "blocks_out", "in": "blocks_in", "copy": "blocks_copied"}[move.kind]
            setattr(self, name, getattr(self, name) + len(move.sources))

    def ran(self, plan: StepPlan) -> None:
        """Count a plan's forward pass."""
        self.steps += 1
        self.draft_rows += len(plan.drafts)
        self.verify_rows += sum(rows for _, rows in plan.verifies)
        self.prefill_rows += sum(chunk.tokens for chunk in plan.prefills)
        self.idle += len(plan.idle)
        self.most_rows = max(self.most_rows, plan.decode_rows)

    def ended(self, request: Request) -> None:
        """Count a request that has ended."""
        assert request.finish_reason is not None
        reason = request.finish_reason.value
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self.rounds += request.rounds
        self.drafted += request.drafted
        self.accepted += request.accepted
        self.emitted += len(request.output)

    def to_dict(self) -> dict[str, Any]:
        """Return the counters and the three rates as plain values."""
        counters = {f.name: getattr(self, f.name) for f in fields(self)}
        # Whoever reads it may do so while a step of another thread counts on.
        counters["finished"] = dict(self.finished)
        rates = ("acceptance_rate", "mean_accepted", "rows_per_step")
        return {**counters, **{name: getattr(self, name) for name in rates}}
