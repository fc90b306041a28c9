"""Greedy acceptance: a draft stands while it is the target's argmax."""

from __future__ import annotations

from torch import Tensor

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance.base import ACCEPTANCE, AcceptanceRule, match


@ACCEPTANCE.register("greedy")
class GreedyRule(AcceptanceRule):
    """The output is plain greedy decoding's, token for token."""

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the argmax."""
        return logits.argmax(dim=-1), None

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept drafts that are the argmax."""
        return match(draft, logits.argmax(dim=-1))
