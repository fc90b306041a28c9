"""Selections of many requests, which stay in one tensor while each request has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pillarattn.datatypes import Selection


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """Selections of many requests: B rows, over all layers that drafts read in part.

    Attributes:
        layers: their numbers.
        indices: `[layers, B, Hkv, N]` int32.
        counts: `[layers, B, Hkv]` int32.
        lengths: `[B]`, tokens when they were chosen.
    """

    layers: tuple[int, ...]
    indices: Tensor
    counts: Tensor
    lengths: Tensor


class ChosenPart(Mapping[int, Selection]):
    """One request's selections by layer, which stay where all of them are.

    Args:
        chosen: of all requests.
        place: its row.
    """

    def __init__(self, chosen: ChosenKeys, place: int) -> None:
        self.chosen, self.place = chosen, place

    def __getitem__(self, layer: int) -> Selection:
        """Return the keys of a layer, cut out."""
        chosen, own = self.chosen, slice(self.place, self.place + 1)
        try:
            at = chosen.layers.index(layer)
        except ValueError:
            raise KeyError(layer) from None
        return Selection(chosen.indices[at, own], chosen.counts[at, own], chosen.lengths[own])

    def __iter__(self) -> Iterator[int]:
        return iter(self.chosen.layers)

    def __len__(self) -> int:
        return len(self.chosen.layers)

    def apart(self) -> ChosenPart:
        """Return the same keys in memory of their own."""
        chosen, own = self.chosen, slice(self.place, self.place + 1)
        kept = ChosenKeys(
            chosen.layers, chosen.indices[:, own].clone(), chosen.counts[:, own].clone(),
            chosen.lengths[own].clone(),
        )  # fmt: skip
        return ChosenPart(kept, 0)
