"""The sanity check: keep every key, so that drafts equal plain decoding."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import SelectionRequest, Strategy, register_strategy


@register_strategy("full")
class FullStrategy(Strategy):
    """Ignores the budget. Every draft is accepted, apart from rounding."""

    needs_scores = False
    keeps_history = False

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Keep all visible positions."""
        return request.keep_best(request.positions(), budgets=request.lengths)
