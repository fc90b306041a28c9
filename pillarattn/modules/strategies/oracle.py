"""The upper bound: each draft step reads the keys that its own query attends to most."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import SelectionRequest, Strategy, register_strategy


@register_strategy("oracle")
class OracleStrategy(Strategy):
    """Top-K of the draft query's own full attention.

    It scores every key at every step, so it saves nothing: it shows what the budget could reach.
    """

    refresh = "step"

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Rank keys by the current query's scores."""
        if request.scores is None:
            raise ValueError("strategy 'oracle' needs scores and got none")
        return request.keep_best(request.scores)
