"""A pass that runs: what was asked of it, and what nobody on the host has looked at yet."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pillarattn.engine.batched_draws import PendingDraws
from pillarattn.engine.decoder import RequestDecoder
from pillarattn.engine.pass_logits import PassLogits
from pillarattn.engine.step_plan import StepPlan


@dataclass(frozen=True)
class Flight:
    """One pass between its launch and its landing.

    Attributes:
        plan: what it does.
        logits: its logits, in the order of the plan.
        places: by request, its segment among them.
        decoders: of its requests; one that ended meanwhile has left, though its name may be back.
        draws: tokens that the device draws; None: that failed, and each request draws by itself.
    """

    plan: StepPlan
    logits: PassLogits
    places: dict[str, int]
    decoders: dict[str, RequestDecoder]
    draws: PendingDraws | None

    def wait(self) -> None:
        """Wait until its tokens are here; whether they came, `draws` tells again."""
        if self.draws is not None:
            with suppress(Exception):
                self.draws.found()

    @property
    def can_wait(self) -> bool:
        """Whether the next pass can begin before this one is looked at.

        Drafts must be drawn on the device, and nothing may depend on what they are.
        """
        if self.draws is None:
            return False
        emitting = [n for n, place in self.places.items() if self.logits.spans[place][1]]
        return all(n in self.draws.last and self.decoders[n].can_wait for n in emitting)
