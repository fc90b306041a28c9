"""Who cruises, and whose rounds have ended in a pass that nobody has looked at yet."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.engine.cruise_inputs import keeps_lse
from pillarattn.engine.cruise_rounds import Report
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.kv_manager import Entry
from pillarattn.engine.step_buffers import Seat, StepBuffers


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
