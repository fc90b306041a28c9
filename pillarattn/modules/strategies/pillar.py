"""The method: keep the keys that the last verify pass scored highest (arXiv 2512.01278)."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy


@register_strategy("pillar")
class PillarStrategy(RankedStrategy):
    """Top-K of the softmax mass averaged over the group's query heads and the accepted rows."""

    keeps_history = False

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by their pooled verify scores."""
        return self.given(request.scores, "scores")
