"""The contract of a policy that says how many tokens a round drafts."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from pillarattn.decoding.parts import RoundPolicy
from pillarattn.registry import Registry


class DraftLength(RoundPolicy):
    """Chooses the length of each draft, at most k; one object serves one generation.

    Whatever it does, the output keeps its law: it may look at rounds that are over and at the
    logits of the draft so far, and so never at a token that it then leaves out.
    """

    @abstractmethod
    def choose(self, k: int) -> int:
        """Return how many tokens to draft in the coming round, 1..k."""

    def goes_on(self, logits: Tensor) -> Tensor | None:
        """Return whether to draft on after tokens drawn from `logits` `[..., V]`, bool `[...]`.

        The logits are the processed ones of the draft. None: whatever they are.
        """
        return None


DRAFT_LENGTHS: Registry[DraftLength] = Registry("draft length")
