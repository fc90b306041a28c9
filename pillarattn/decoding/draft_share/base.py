"""The contract of a policy that says what share of the context drafts read."""

from __future__ import annotations

from abc import abstractmethod

from pillarattn.decoding.parts import RoundPolicy
from pillarattn.registry import Registry


class DraftShare(RoundPolicy):
    """Chooses s for each round; one object serves one generation.

    It may look at rounds that are over, and so cannot change the law of the output.
    """

    @abstractmethod
    def choose(self, s: float) -> float:
        """Return the share that the coming round reads, given the configured one."""


DRAFT_SHARES: Registry[DraftShare] = Registry("draft share")


@DRAFT_SHARES.register("constant")
class ConstantShare(DraftShare):
    """Reads the configured share in every round."""

    name = "constant"

    def choose(self, s: float) -> float:
        """Return s."""
        return s
