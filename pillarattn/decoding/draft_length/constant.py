"""Always the same length."""

from __future__ import annotations

from pillarattn.decoding.draft_length.base import DRAFT_LENGTHS, DraftLength


@DRAFT_LENGTHS.register("constant")
class ConstantLength(DraftLength):
    """Drafts k tokens in every round."""

    name = "constant"

    def choose(self, k: int) -> int:
        """Return k."""
        return k
