"""Who cruises, and whose rounds have ended in a pass that nobody has looked at yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pillarattn.engine.cruise_inputs import StepInputs, keeps_lse, step_inputs
from pillarattn.engine.cruise_rounds import Report
from pillarattn.engine.cruise_schedule import StepRows
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.kv_manager import Entry
from pillarattn.engine.step_buffers import Seat, StepBuffers
from pillarattn.engine.step_plan import StepPlan


@dataclass(eq=False)
class Member:
    """A request that cruises.

    Attributes:
        name: its id.
        decoder, entry: its own.
        seat: where its inputs are.
        rounds: verify passes since it began.
    """

    name: str
    decoder: RequestDecoder
    entry: Entry
    seat: Seat
    rounds: int = 0

    def has_ended(self) -> bool:
        """Whether nothing is asked of it any more."""
        return self.decoder.request.finish_reason is not None

    def can_go_on(self, buffers: StepBuffers, k: int) -> bool:
        """Whether its drafts have left what the rows that verify them need."""
        decoder = self.decoder
        if not (decoder.drafts and decoder.keys.scored_layers and keeps_lse(buffers, k)):
            return True
        return self.seat.kept.covers(decoder.length - 1, len(decoder.drafts) + 1)


@dataclass(frozen=True)
class Landing:
    """Rounds of `members` that ended in a pass, and what waits for it: nobody has looked yet."""

    members: list[Member]
    report: Report


def step_of(
    members: list[Member], rows: StepRows, buffers: StepBuffers, *, k: int, padded: int,
    scores: bool,
) -> tuple[StepInputs, StepPlan]:  # fmt: skip
    """Return the inputs of a step, and what it does.

    Args:
        members: in the order of their seats.
        rows: who moves.
        buffers: as large as the step needs.
        k: drafts of a round.
        padded: rows of the step, those of nobody included.
        scores: whether verify passes leave scores.
    """
    judged = padded // (k + 1)
    inputs = step_inputs(
        rows, np.array([m.seat.number for m in members]),
        [m.decoder.kind for m in members if m.decoder.kind], buffers, k=k, is_scored=scores,
        padded=padded, judged=min(judged, buffers.sizes.places) if scores else judged,
    )  # fmt: skip
    names = [member.name for member in members]
    plan = StepPlan(
        drafts=tuple(names[i] for i in rows.drafting),
        verifies=tuple((names[i], k + 1) for i in rows.verifying),
        idle=tuple(names[i] for i in rows.idle),
    )
    return inputs, plan
