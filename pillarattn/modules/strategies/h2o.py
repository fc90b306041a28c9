"""H2O: the keys that collected the most attention so far, and the newest ones."""

from __future__ import annotations

from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy
from pillarattn.modules.strategies.history import PositionHistory


@register_strategy("h2o")
class HeavyHitterStrategy(RankedStrategy):
    """Half the budget for heavy hitters by accumulated softmax mass, half for recent tokens.

    The mass of every accepted verify row is added up, for each layer and KV head, from the prompt's
    last rows on. Unlike the original, which evicts for ever, a key that was passed over stays in
    the cache and can come back.

    Args:
        decay: factor on what was accumulated, once a round; 1 is the paper's sum.
        recent_share: share of the budget for the newest tokens, 0..1.

    Source: arXiv 2306.14048 (reference.md 5.5).
    """

    keeps_history = True

    def __init__(self, decay: float = 1.0, recent_share: float = 0.5) -> None:
        if not (0 <= decay <= 1 and 0 <= recent_share <= 1):
            raise ValueError(
                f"decay and recent_share must be in 0..1, got {decay} and {recent_share}"
            )
        self.decay = decay
        self.recent_share = recent_share
        self._mass = PositionHistory()

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._mass.clear()

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank the recent half above all, then keys by accumulated mass."""
        scores = self.given(request.scores, "scores").float()
        rows = 1.0 if request.rows is None else request.rows.view(-1, 1, 1)
        mass = request.committed(scores) * rows + self.decay * self._mass.read(request)
        self._mass.write(request, mass)
        newest = (request.budgets * self.recent_share).long()
        positions = request.positions()
        is_recent = positions >= (request.lengths - newest).view(-1, 1, 1)
        largest = mass.amax(dim=-1, keepdim=True).clamp_min(1e-30)
        return (mass / largest).where(~is_recent, 2 + positions)
