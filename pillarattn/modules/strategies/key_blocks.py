"""Blocks of consecutive keys and a summary of each, computed once, when the block is complete."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pillarattn.modules.strategies.request import LayerState, SelectionRequest


class KeyBlocks:
    """Remembers a summary of every complete block of a layer's keys, for one generation.

    Committed keys never change, so a block is read once. Blocks that a roll back has opened again
    are computed anew.

    Args:
        size: tokens in a block.
        summarise: `[B, Hkv, P, size, D]` keys to `[B, Hkv, P, M]`.
    """

    def __init__(self, size: int, summarise: Callable[[Tensor], Tensor]) -> None:
        if size < 1:
            raise ValueError(f"a block holds at least 1 token, got {size}")
        self.size = size
        self.summarise = summarise
        self._blocks: dict[int, Tensor] = {}
        self._complete: dict[int, list[int]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._complete.clear()

    def rank(self, request: SelectionRequest, vectors: Tensor) -> Tensor:
        """Return the product of `vectors` `[R, Hkv, M]` and each key's block, `[R, Hkv, S]` fp32.

        The last block of a row is always kept: until it is complete, its keys get infinity.
        """
        blocks = self._read(request)
        scores = _products(vectors.float(), blocks).repeat_interleave(self.size, dim=-1)
        missing = max(request.max_length - scores.shape[-1], 0)
        scores = torch.nn.functional.pad(scores, (0, missing))[..., : request.max_length]
        line = torch.arange(request.max_length, device=scores.device)
        begun = (request.lengths // self.size * self.size).unsqueeze(-1)
        return scores.masked_fill((line >= begun).unsqueeze(1), float("inf"))

    def _read(self, request: SelectionRequest) -> Tensor:
        """Return the summaries of the request's layer, `[B, Hkv, P, M]`, brought up to date."""
        if len(request.layers) != 1:
            raise ValueError(f"blocks are ranked layer by layer, got {len(request.layers)} layers")
        (layer,) = request.layers
        assert layer.keys is not None
        wanted = [n // self.size for n in request.lengths_on_host()]
        if layer.keys.shape[0] == 1:
            # All rows read one text: it is complete as far as the longest of them.
            wanted = [max(wanted)]
        done = self._complete.get(layer.index, [0] * len(wanted))
        done = [min(old, new) for old, new in zip(done, wanted, strict=True)]
        if layer.index not in self._blocks or done != wanted:
            self._extend(layer, done, wanted)
        self._complete[layer.index] = wanted
        return self._blocks[layer.index]

    def _extend(self, layer: LayerState, done: list[int], wanted: list[int]) -> None:
        """Summarise blocks `done..wanted` of each row; rows that have fewer compute some twice."""
        keys = layer.keys
        assert keys is not None
        batch, heads, length, dim = keys.shape
        count = max(new - old for old, new in zip(done, wanted, strict=True))
        first = torch.tensor(done, device=keys.device)
        tokens = torch.arange(count * self.size, device=keys.device)
        places = (first.unsqueeze(-1) * self.size + tokens).clamp_max(length - 1)
        index = places[:, None, :, None].expand(-1, heads, -1, dim)
        new = self.summarise(
            keys.gather(2, index).view(batch, heads, count, self.size, dim).float()
        )
        old = self._blocks.get(layer.index)
        total = max(*wanted, 0 if old is None else old.shape[2])
        grown = new.new_zeros(batch, heads, total, new.shape[-1])
        if old is not None:
            grown[:, :, : old.shape[2]] = old
        for row, (begin, end) in enumerate(zip(done, wanted, strict=True)):
            grown[row, :, begin:end] = new[row, :, : end - begin]
        self._blocks[layer.index] = grown


def _products(vectors: Tensor, blocks: Tensor) -> Tensor:
    """Return `[R, Hkv, P]`: vectors `[R, Hkv, M]` times blocks `[B, Hkv, P, M]`, B = R or 1."""
    if blocks.shape[0] == 1:
        return (vectors.transpose(0, 1) @ blocks[0].transpose(-1, -2)).transpose(0, 1)
    return (blocks @ vectors.unsqueeze(-1)).squeeze(-1)
