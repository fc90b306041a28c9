"""The lower bound: keys drawn uniformly at random."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy


@register_strategy("uniform")
class UniformStrategy(RankedStrategy):
    """A fresh random set each round, for each layer and KV head; the same on every run.

    Args:
        seed: key of the draws, >= 0.
    """

    needs_scores = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by noise that depends on the seed and the round alone."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + request.round_index)
        shape = (request.lengths.shape[0], request.kv_heads, request.max_length)
        return torch.rand(shape, generator=generator).to(request.lengths.device)
