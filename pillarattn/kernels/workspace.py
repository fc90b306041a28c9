"""Memory that passes of one run use again and again."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Texts grow: a little more than asked for serves the next passes too.
SPARE = 1.125


class Workspace:
    """Tensors by name, as large as the largest request so far; what they hold is undefined.

    On a CPU fresh memory costs page faults, which take as long as the arithmetic on it: what a
    layer computes on the way to its scores is shared by all layers, and the scores of each layer
    take the place of those of its last pass.

    Attributes:
        layer: whose scores are asked for.
    """

    def __init__(self) -> None:
        self.layer = 0
        self._held: dict[tuple[str, int], Tensor] = {}

    def shared(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a contiguous tensor that holds until any layer asks for `name` again."""
        return self._take((name, -1), shape, like)

    def of_layer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a contiguous tensor that holds until the same layer asks for `name` again."""
        return self._take((name, self.layer), shape, like)

    def _take(self, key: tuple[str, int], shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = math.prod(shape)
        held = self._held.get(key)
        if held is None or held.numel() < size or held.dtype != like.dtype:
            held = torch.empty(int(size * SPARE), dtype=like.dtype, device=like.device)
            self._held[key] = held
        return held[:size].view(shape)

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        # A copy has nothing to lose.
        return Workspace, ()
