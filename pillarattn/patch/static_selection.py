"""Selections at fixed addresses, refilled before a recorded draft pass is replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Selection

# Widths are rounded up to this times a power of two: what is past the counts costs little, and
# budgets that move between heads give another width in every round.
STEP = 128


class StaticSelection:
    """Memory for the keys that drafts read, by layer, wide enough for those of many rounds.

    Args:
        selections: the first ones, whose shapes decide.
        least: keys that there is room for at least.

    Attributes:
        selections: views of the memory, by layer.
    """

    def __init__(self, selections: dict[int, Selection], least: int = 0) -> None:
        first = next(iter(selections.values()))
        self._tail_start = first.tail_start.clone()
        shapes = {tuple(s.counts.shape) for s in selections.values()}
        width = _width(selections, least)
        # Layers that are alike lie side by side, so that one copy refills them all.
        self._stack: tuple[Tensor, Tensor] | None = None
        if len(shapes) == 1:
            size = (len(selections), *shapes.pop())
            self._stack = (
                first.indices.new_zeros(*size, width),
                first.counts.new_zeros(size),
            )
            parts = list(zip(*self._stack, strict=True))
        else:
            parts = [
                (s.indices.new_zeros(*s.counts.shape, width), torch.zeros_like(s.counts))
                for s in selections.values()
            ]
        self.selections = {
            layer: Selection(indices, counts, self._tail_start)
            for layer, (indices, counts) in zip(selections, parts, strict=True)
        }
        self._loaded: list[Selection] = []

    @staticmethod
    def kind_of(selections: dict[int, Selection], least: int = 0) -> Any:
        """Return what two rounds must share to use the same memory; None if none can be shared."""
        starts = {id(s.tail_start) for s in selections.values()}
        if len(starts) != 1:
            return None
        heads = tuple((layer, s.counts.shape[1]) for layer, s in selections.items())
        return _width(selections, least), heads

    def load(self, selections: dict[int, Selection]) -> None:
        """Copy a round's selections in, unless they are there already."""
        given = list(selections.values())
        if len(given) == len(self._loaded) and all(map(_is, given, self._loaded)):
            return
        self._tail_start.copy_(given[0].tail_start)
        widths = {s.indices.shape[2] for s in given}
        if self._stack is not None and len(widths) == 1:
            indices, counts = self._stack
            indices[..., : widths.pop()] = torch.stack([s.indices for s in given])
            counts.copy_(torch.stack([s.counts for s in given]))
        else:
            for own, one in zip(self.selections.values(), given, strict=True):
                own.indices[..., : one.indices.shape[2]] = one.indices
                own.counts.copy_(one.counts)
        self._loaded = given


def _width(selections: dict[int, Selection], least: int) -> int:
    widest = max(least, *(s.indices.shape[2] for s in selections.values()))
    return STEP << max(0, -(-widest // STEP) - 1).bit_length()


def _is(one: object, other: object) -> bool:
    return one is other
