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
    needs_rounds = True
    keeps_history = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by noise that depends on the seed and the round alone."""
        rows, heads, size = len(request.lengths), request.kv_heads, request.max_length
        if not request.rounds:
            noise = self._draw(request.round_index, (rows, heads, size))
            return noise.to(request.lengths.device)
        # One text's rounds: each draws for itself, as it would alone.
        layers = len(request.layers)
        device = request.lengths.device
        noise = torch.zeros(layers, rows // layers, heads, size, device=device)
        lengths = request.lengths_on_host()
        for row, number in enumerate(request.rounds):
            length = lengths[row]
            noise[:, row, :, :length] = self._draw(number, (layers, heads, length))
        return noise.flatten(0, 1)

    def _draw(self, round_number: int, shape: tuple[int, int, int]) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + round_number)
        return torch.rand(shape, generator=generator)
