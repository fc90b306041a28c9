"""The method: keep the keys that the last verify pass scored highest (arXiv 2512.01278)."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import SelectionRequest, Strategy, register_strategy


@register_strategy("pillar")
class PillarStrategy(Strategy):
    """Top-K of the softmax mass averaged over the group's query heads and the accepted rows."""

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Rank keys by their pooled verify scores."""
        if request.scores is None:
            raise ValueError("strategy 'pillar' needs scores and got none")
        return request.keep_best(request.scores)
