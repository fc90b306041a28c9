"""Linear layers that read the same rows, as one product: queries, keys and values; gate and up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Copies of weights may take so many bytes: a small model's products are bound by their launches, a
# large one's by reading the weights, which copies do not make fewer.
MOST_BYTES = 512 * 2**20


class JoinedWeights:
    """Copies of the weights of such layers, one below the other, where they are small enough.

    Copies follow the model at each `fill`, which every run begins with. They are no inference
    tensors: a later run may not be in that mode, and writes to them.
    """

    def __init__(self) -> None:
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._memory: list[tuple[Tensor, Tensor | None]] = []

    def fill(self, groups: list[list[nn.Linear]]) -> None:
        """Copy the weights of groups of layers, to where an earlier call put them."""
        self._weights.clear()
        size = sum(linear.weight.nbytes for group in groups for linear in group)
        if size > MOST_BYTES or (self._memory and len(self._memory) != len(groups)):
            return
        if not all(map(_are_alike, groups)):
            return
        with torch.inference_mode(False), torch.no_grad():
            for place, group in enumerate(groups):
                weight = torch.cat([linear.weight for linear in group])
                bias = None
                if group[0].bias is not None:
                    bias = torch.cat([linear.bias for linear in group])
                if place == len(self._memory):
                    self._memory.append((weight, bias))
                else:
                    for old, new in zip(self._memory[place], (weight, bias), strict=True):
                        if old is not None and new is not None:
                            old.copy_(new)
                self._weights[id(group[0])] = self._memory[place]

    def outputs(self, linears: list[nn.Linear], rows: Tensor) -> Tensor:
        """Return the outputs of several linear layers side by side, `[T, sum of widths]`."""
        joined = self._weights.get(id(linears[0]))
        if joined is not None:
            return nn.functional.linear(rows, *joined)
        widths = [linear.out_features for linear in linears]
        out = rows.new_empty(rows.shape[0], sum(widths))
        for linear, part in zip(linears, out.split(widths, dim=1), strict=True):
            bias: Tensor | None = linear.bias
            if bias is None:
                torch.mm(rows, linear.weight.T, out=part)
            else:
                torch.addmm(bias, rows, linear.weight.T, out=part)
        return out


def _are_alike(group: list[nn.Linear]) -> bool:
    return len({(linear.bias is None, linear.weight.dtype) for linear in group}) == 1
