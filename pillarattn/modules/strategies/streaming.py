"""StreamingLLM: the first tokens and the newest ones, the same for all heads and layers."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import SelectionRequest, Strategy, register_strategy


@register_strategy("streaming")
class StreamingStrategy(Strategy):
    """Sinks plus a window of recent tokens, at true positions over the shared cache.

    Source: arXiv 2309.17453; as a drafter: MagicDec, arXiv 2408.11049.
    """

    needs_scores = False

    def select(self, request: SelectionRequest) -> tuple[Tensor, Tensor]:
        """Rank keys by position, newest first."""
        return request.keep_best(request.positions())
