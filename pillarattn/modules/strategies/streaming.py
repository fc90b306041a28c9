"""StreamingLLM: the first tokens and the newest ones, the same for all heads and layers."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy


@register_strategy("streaming")
class StreamingStrategy(RankedStrategy):
    """Sinks plus a window of recent tokens, at true positions over the shared cache.

    Source: arXiv 2309.17453; as a drafter: MagicDec, arXiv 2408.11049.
    """

    needs_scores = False
    keeps_history = False

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by position, newest first."""
        return request.positions()
