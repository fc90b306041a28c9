"""A budget shared by several strategies, which take their best keys in turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pillarattn.modules.strategies.base import (
    STRATEGIES,
    RankedStrategy,
    SelectionRequest,
    check_flags,
    register_strategy,
)


@register_strategy("union")
class UnionStrategy(RankedStrategy):
    """The union of two or more rankings at one budget.

    Forced tokens are kept first. What is left of the budget is filled in turns, in proportion to
    the shares: part i has picked its n-th best key at turn n / share_i. A key that two parts pick
    is paid for once, and the turns go on until the budget is used up, so that nothing is wasted.
    Keys of the same turn go by position, lowest first.

    Args:
        parts: names or strategies that define `rank`.
        shares: one positive number a part, any scale; None is equal shares.

    Raises:
        ValueError: fewer than two parts, shares that do not fit, or parts that choose at different
            times (`refresh`). TypeError: a part has no ranking.
    """

    # Beside that of its parts.
    keeps_history = False

    def __init__(
        self,
        parts: Sequence[str | RankedStrategy] = ("pillar", "streaming"),
        shares: Sequence[float] | None = None,
    ) -> None:
        self.parts = [_strategy(part) for part in parts]
        if len(self.parts) < 2:
            raise ValueError(f"a union takes at least two parts, got {len(self.parts)}")
        self.shares = [1.0] * len(self.parts) if shares is None else list(shares)
        if len(self.shares) != len(self.parts) or min(self.shares) <= 0:
            raise ValueError(
                f"shares must be {len(self.parts)} positive numbers, one a part, got {shares!r}"
            )
        self.keeps_history = type(self).keeps_history or any(p.keeps_history for p in self.parts)
        timing = {(part.refresh, part.refresh_steps) for part in self.parts}
        if len(timing) > 1:
            raise ValueError(
                f"the parts of a union must choose at the same time, got {sorted(map(str, timing))}"
            )
        ((self.refresh, self.refresh_steps),) = timing
        for flag in ("scores", "row_scores", "keys", "values", "queries", "tokens", "rounds"):
            setattr(self, f"needs_{flag}", any(getattr(p, f"needs_{flag}") for p in self.parts))
        rows = [part.seed_rows for part in self.parts if part.seed_rows is not None]
        self.seed_rows = max(rows, default=None)
        self.foresees = any(part.foresees for part in self.parts)
        check_flags(self)

    def reset(self) -> None:
        """Reset the parts."""
        for part in self.parts:
            part.reset()

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by the turn at which the first of the parts picks them."""
        open_places = request.contested().unsqueeze(1)
        turns = [
            _places(part.rank(request).float().masked_fill(~open_places, float("-inf"))) / share
            for part, share in zip(self.parts, self.shares, strict=True)
        ]
        return -torch.stack(turns).amin(dim=0)

    def extra_reads(self, length: int, k: int) -> float:
        """Return the sum over the parts."""
        return sum(part.extra_reads(length, k) for part in self.parts)


def _strategy(part: str | RankedStrategy) -> RankedStrategy:
    strategy = STRATEGIES.get(part)() if isinstance(part, str) else part
    if not isinstance(strategy, RankedStrategy):
        raise TypeError(f"a part of a union must subclass RankedStrategy, got {strategy!r}")
    return strategy


def _places(scores: Tensor) -> Tensor:
    """Return each key's place in the order of `scores`, 1 for the best; ties by position."""
    order = scores.nan_to_num(nan=float("-inf"), neginf=float("-inf"), posinf=float("inf"))
    order = order.argsort(dim=-1, descending=True, stable=True)
    line = torch.arange(1, scores.shape[-1] + 1, device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, line).float()
