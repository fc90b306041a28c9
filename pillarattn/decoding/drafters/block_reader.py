"""Reads rows of text into a model's cache, each at its own place, and goes back on demand."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.decoding.target import Target
from pillarattn.modules.step import StepState


class BlockReader:
    """A model that has read the first tokens of every row, and reads on in blocks.

    Lengths count tokens of the history, as `History.lengths` do; a cache may hold more or fewer,
    because padding left it or an earlier turn came before.

    Args:
        target: the model.
        step: what its passes are for.
        lengths: tokens of each row that it has read: where it may always go back to.

    Attributes:
        passes: for each pass, how far each row then was past `lengths`.
    """

    def __init__(self, target: Target, step: StepState, lengths: list[int]) -> None:
        self.target = target
        self.step = step
        self.base = list(lengths)
        self.lengths = list(lengths)
        self.passes: list[list[int]] = []
        self._opened = target.cache.lengths
        self._extra = [c - n for c, n in zip(self._opened.host, lengths, strict=True)]
        self._cuts = bool(getattr(target, "cuts", False))

    def read(
        self, ids: Tensor, ends: list[int], *, count: int = 1, newest: Tensor | None = None
    ) -> Tensor:
        """Read each row up to `ends` and return the logits after its last `count` tokens.

        Args:
            ids: `[B, S]`, the text.
            ends: tokens of each row to have read afterwards.
            count: at least 1 and no more than a row has.
            newest: `[B, 1]`, the last token of each row, if the caller has it at hand.

        Returns:
            `[B, count, V]`; column i of row b follows `ids[b, : ends[b] - count + 1 + i]`.
        """
        self.go_back([min(n, end - count) for n, end in zip(self.lengths, ends, strict=True)])
        widths = [end - n for n, end in zip(self.lengths, ends, strict=True)]
        width = max(widths)
        if width == 1 and newest is not None:
            tokens = newest
        else:
            table = torch.tensor([self.lengths, ends], device=ids.device).unsqueeze(-1)
            place = table[0] + torch.arange(width, device=ids.device)
            # Shorter rows repeat their last token, and then forget it.
            tokens = ids.gather(1, place.minimum(table[1] - 1))
        logits = self.target.forward(tokens, self.step)
        self.lengths = [n + width for n in self.lengths]
        self.passes.append([n - old for n, old in zip(ends, self.base, strict=True)])
        if min(widths) == width:
            return logits[:, width - count :]
        first = torch.tensor(widths, device=logits.device).unsqueeze(-1) - count
        column = first + torch.arange(count, device=logits.device)
        self.go_back(ends)
        return logits.gather(1, column.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))

    def go_back(self, lengths: list[int]) -> None:
        """Forget what lies past `lengths`; a model that cannot stop there goes back to the base."""
        if lengths == self.lengths:
            return
        self.lengths = list(lengths) if self._cuts else list(self.base)
        cut = self._opened
        if self.lengths != self.base:
            places = [n + more for n, more in zip(self.lengths, self._extra, strict=True)]
            cut = RowLengths(places, cut.device)
        self.target.roll_back(cut)

    def close(self) -> None:
        """Leave the model as it was found."""
        self.go_back(self.base)
