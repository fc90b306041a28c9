"""Quest: pages of keys, ranked at each draft step by a bound on their attention logits."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy
from pillarattn.modules.strategies.key_blocks import KeyBlocks

GROUPS = ("mean", "max")


@register_strategy("quest")
class QuestStrategy(RankedStrategy):
    """Pages whose upper bound on query times key is largest, for each draft step's own query.

    A page keeps the smallest and the largest value of each channel of its keys (post position
    embedding); `sum_d max(q_d * max_d, q_d * min_d)` bounds the logit of every key in it. Pages are
    taken whole, best first, until the budget is used up, so that the last one may be cut; the page
    that is being written is always kept.

    Choosing reads two vectors a page at every step: with 16 tokens a page, 1/16 of all keys and
    values, on top of the budget (`extra_reads`). The original leaves its first two layers dense
    and is for one query head per KV head; here every layer has the same budget.

    Args:
        page: tokens in a page.
        group: where a KV head serves several query heads, "mean" averages their bounds and "max"
            takes the largest.
        once: choose at a round's first draft step alone, which reads the bounds once a round.

    Raises:
        ValueError: an argument is out of range.

    Source: arXiv 2406.10774 (reference.md 5.4).
    """

    refresh = "step"
    needs_scores = False
    needs_keys = True
    needs_queries = True
    keeps_history = False

    def __init__(self, page: int = 16, *, group: str = "mean", once: bool = False) -> None:
        if group not in GROUPS:
            raise ValueError(f"group must be one of {', '.join(map(repr, GROUPS))}, got {group!r}")
        self.page = page
        self.group = group
        self.once = once
        self.refresh_steps = (0,) if once else None
        self._pages = KeyBlocks(page, _bounds)

    def reset(self) -> None:
        """Forget the pages."""
        self._pages.clear()

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by the bound of their page."""
        heads = request.grouped_query()
        # Where q_d < 0 the smallest key is the worst case; else the largest: one dot product.
        parts = torch.cat([heads.clamp_max(0), heads.clamp_min(0)], dim=-1)
        if self.group == "mean":
            return self._pages.rank(request, parts.mean(dim=2))
        each = [self._pages.rank(request, part) for part in parts.unbind(dim=2)]
        return torch.stack(each).amax(dim=0)

    def extra_reads(self, length: int, k: int) -> float:
        """Return the bounds' bytes: two vectors, as a key and its value, for each page."""
        return length / self.page / (k if self.once else 1)


def _bounds(keys: Tensor) -> Tensor:
    """Return the smallest and the largest value of each channel, `[B, Hkv, P, 2 * D]`."""
    return torch.cat([keys.amin(dim=3), keys.amax(dim=3)], dim=-1)
