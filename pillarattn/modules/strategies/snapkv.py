"""SnapKV: the prompt's keys are chosen once, by an observation window at its end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy
from pillarattn.modules.strategies.history import PositionHistory

WINDOW = 32


@register_strategy("snapkv")
class SnapKVStrategy(RankedStrategy):
    """Prompt keys that the prompt's last queries attend to, smoothed along the text, then frozen.

    After the prompt, the budget less the window goes to the prompt's best keys: softmax mass summed
    over the window's rows and the group, average-pooled over `pool` neighbours. That choice stands
    for the whole generation, as in the paper: later rounds never look at scores again. The rest of
    the budget, which is the window and what the budget gains as the text grows, goes to the newest
    tokens.

    The window's rows are those that the decoder keeps of the prompt (`seed_rows` asks for 32).

    Args:
        window: newest prompt tokens that are kept unseen, in tokens; at most half the budget.
        pool: positions that a key's score is averaged over, odd.

    Source: arXiv 2404.14469; as a drafter: MagicDec, arXiv 2408.11049 (reference.md 5.2).
    """

    keeps_history = True
    seed_rows = WINDOW

    def __init__(self, window: int = WINDOW, pool: int = 5) -> None:
        if window < 1 or pool < 1 or pool % 2 == 0:
            raise ValueError(f"window must be >= 1 and pool odd and >= 1, got {window} and {pool}")
        self.window = window
        self.pool = pool
        self._frozen = PositionHistory()

    def reset(self) -> None:
        """Forget the prompt."""
        self._frozen.clear()

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank the prompt's frozen keys first, then the newest tokens."""
        if max(self._frozen.known_lengths(request)) == 0:
            self._freeze(request)
        recency = request.positions() / max(request.max_length, 1)
        return recency + 2 * self._frozen.read(request)

    def _freeze(self, request: SelectionRequest) -> None:
        """Mark the prompt keys to keep with 1."""
        scores = request.committed(self.given(request.scores, "scores").float())
        smooth = avg_pool1d(scores, self.pool, stride=1, padding=self.pool // 2)
        window = (request.budgets // 2).clamp_max(self.window)
        newest = torch.maximum(request.recent, window)
        indices, counts = request.keep_best(smooth, recent=newest)
        used = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        # One place too many takes the entries that are not used.
        marks = smooth.new_zeros(*smooth.shape[:2], request.max_length + 1)
        places = indices.long().masked_fill(~used, request.max_length)
        marks = marks.scatter(2, places, 1.0)[..., :-1]
        line = torch.arange(request.max_length, device=marks.device)
        rolling = line >= (request.lengths - newest).unsqueeze(-1)
        self._frozen.write(request, marks.masked_fill(rolling.unsqueeze(1), 0.0))
