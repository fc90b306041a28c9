"""Linear layers that read the same rows, as one product: queries, keys and values; gate and up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pillarattn.patch.weight_memory import Pair, as_one

# Copies of weights may take so many bytes. Weights that are to be joined without copies lie
# together already: see `patch(join_weights=True)`.
MOST_BYTES = 512 * 2**20


class JoinedWeights:
    """The weights of such layers, one below the other, where they lie so or are small enough.

    Those that lie elsewhere are copied: copies follow the model at each `fill`, which every run
    begins with. They are no inference tensors: a later run may not be in that mode, and writes to
    them.
    """

    def __init__(self) -> None:
        self._weights: dict[int, Pair] = {}
        self._memory: list[Pair] = []
        # Whose they are: by the first layers of the groups.
        self._copied: list[int] = []
        # Where each layer's weight and bias lie in it.
        self._parts: list[Tensor] = []

    def fill(self, groups: list[list[nn.Linear]]) -> None:
        """Join the weights of groups of layers; copies go to where an earlier call put them."""
        self._weights.clear()
        apart = []
        for group in groups:
            joined = as_one(group)
            if joined is None:
                apart.append(group)
            else:
                self._weights[id(group[0])] = joined
        self._copy(apart)

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

    def _copy(self, groups: list[list[nn.Linear]]) -> None:
        held: list[list[Pair]] = [
            [(linear.weight, linear.bias) for linear in group] for group in groups
        ]
        size = sum(weight.nbytes for group in held for weight, _ in group)
        names = [id(linears[0]) for linears in groups]
        if not 0 < size <= MOST_BYTES or (self._memory and self._copied != names):
            return
        if not all(map(_are_alike, held)):
            return
        with torch.inference_mode(False), torch.no_grad():
            if not self._memory:
                self._memory, self._copied = list(map(_empty, held)), names
                for group, memory in zip(held, self._memory, strict=True):
                    self._parts += _parts(group, memory)
            new = [t for group in held for pair in group for t in pair if t is not None]
            # One call: a launch for each of them would take as long as a pass.
            torch._foreach_copy_(self._parts, new)
        for linears, memory in zip(groups, self._memory, strict=True):
            self._weights[id(linears[0])] = memory


def _empty(group: list[Pair]) -> Pair:
    """Return memory for the joined weights of a group, and for its biases."""
    weight, bias = group[0]
    rows = sum(one.shape[0] for one, _ in group)
    return weight.new_empty(rows, weight.shape[1]), None if bias is None else bias.new_empty(rows)


def _parts(group: list[Pair], memory: Pair) -> list[Tensor]:
    """Return where each layer's weight and bias go, in that order, layer by layer."""
    heights = [weight.shape[0] for weight, _ in group]
    parts = [one.split(heights) for one in memory if one is not None]
    return [part for both in zip(*parts, strict=True) for part in both]


def _are_alike(group: list[Pair]) -> bool:
    return len({(bias is None, weight.dtype) for weight, bias in group}) == 1
