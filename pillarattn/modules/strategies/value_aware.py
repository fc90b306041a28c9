"""Value-aware scores: what a key adds to the output, not only how much attention it gets."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.modules.strategies.base import RankedStrategy, SelectionRequest, register_strategy
from pillarattn.modules.strategies.history import PositionHistory


@register_strategy("value_aware")
class ValueAwareStrategy(RankedStrategy):
    """Top-K of the pooled verify score times the length of the value vector, per KV head.

    Leaving out key j changes the output by about `score_j * ||v_j - output||`. Each value is read
    once: a committed one never changes, so its length is remembered.
    """

    needs_values = True
    keeps_history = False

    def __init__(self) -> None:
        self._norms = PositionHistory()

    def reset(self) -> None:
        """Forget the lengths of the values."""
        self._norms.clear()

    def rank(self, request: SelectionRequest) -> Tensor:
        """Rank keys by score times length of value."""
        scores = request.committed(self.given(request.scores, "scores").float())
        norms = self._value_norms(request)
        by_layer = (len(request.layers), -1, *scores.shape[1:])
        return (scores.view(by_layer) * norms.view(by_layer)).view(scores.shape)

    def _value_norms(self, request: SelectionRequest) -> Tensor:
        """Return the length of each value, `[layers * B, Hkv, S]`; B is 1 for rows of one text."""
        request = request.of_texts(self.given(request.layers[0].values, "values").shape[0])
        known = self._norms.known_lengths(request)
        norms = self._norms.read(request)
        per_layer = torch.split(norms, norms.shape[0] // len(request.layers))
        for place, (layer, own) in enumerate(zip(request.layers, per_layer, strict=True)):
            values = self.given(layer.values, "values")
            rows = len(own)
            first = min(known[place * rows : (place + 1) * rows])
            fresh = values[:, :, first : request.max_length].float()
            own[:, :, first:] = torch.linalg.vector_norm(fresh, dim=-1)
        self._norms.write(request, norms)
        return request.committed(norms)
