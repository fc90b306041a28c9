"""Read more where drafts fail, and less where they hold."""

from __future__ import annotations

import math

from pillarattn.decoding.draft_share.base import DRAFT_SHARES, DraftShare


@DRAFT_SHARES.register("acceptance")
class AcceptanceShare(DraftShare):
    """Steers s so that the acceptance rate stays near a target.

    After each round, s is multiplied by exp(gain * (target - accepted / drafted)) and kept between
    the configured s times `least` and times `most` (and at most 1).

    Args:
        target: acceptance rate to keep, 0 < target < 1.
        gain: how fast s follows; a round that accepts nothing raises it by exp(gain * target).
        least: smallest share, as a multiple of the configured s, 0 < least <= 1.
        most: largest share, likewise, >= 1.

    Raises:
        ValueError: an argument is out of range.
    """

    name = "acceptance"

    def __init__(
        self, target: float = 0.75, *, gain: float = 0.2, least: float = 0.5, most: float = 4.0
    ) -> None:
        if not 0 < target < 1:
            raise ValueError(f"target must be 0 < target < 1, got {target}")
        if gain <= 0:
            raise ValueError(f"gain must be > 0, got {gain}")
        if not 0 < least <= 1 <= most:
            raise ValueError(f"must be 0 < least <= 1 <= most, got least={least}, most={most}")
        self.target = target
        self.gain = gain
        self.least = least
        self.most = most
        self._factor = 1.0

    def choose(self, s: float) -> float:
        """Return s times what recent rounds asked for."""
        return min(1.0, s * self._factor)

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """Move the share by how far the round was from the target."""
        if not sum(drafted):
            return
        short = self.target - sum(accepted) / sum(drafted)
        factor = self._factor * math.exp(self.gain * short)
        self._factor = min(self.most, max(self.least, factor))

    def reset(self) -> None:
        """Go back to the configured share."""
        self._factor = 1.0
