"""Vegas: the first and the last verified row choose one list a layer, shared by all heads."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy


@register_strategy("vegas")
class VegasStrategy(RankedStrategy):
    """Top-K of the softmax mass of two verify rows, averaged over all query heads of a layer.

    The rows are the round's first and the last accepted one; the first selection uses the prompt's
    last row alone. The budget is the library's: recent tokens count inside it, where the original
    adds them, and its own floor of 256 tokens is `min_budget` here.

    Source: arXiv 2602.07223 (reference.md 5.7).
    """

    needs_scores = False
    needs_row_scores = True
    needs_rounds = True
    keeps_history = False

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by the mean over heads and both rows, the same for every KV head."""
        last = self.given(request.rows, "scores").unsqueeze(-1) - 1
        first = last.masked_fill(request.round_numbers().unsqueeze(-1) > 0, 0)
        both = request.row_scores(torch.cat([first, last], dim=1))
        mean = request.mean_over_heads(both.mean(dim=2))
        return mean.unsqueeze(1).expand(-1, request.kv_heads, -1)
