"""The keys that drafts read, at the seats of their requests: written once a round."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pillarattn.datatypes import Selection, on_device
from pillarattn.engine.chosen_keys import ChosenKeys, ChosenPart
from pillarattn.kernels.mixed_attention import READS_ALL, slots_of
from pillarattn.kernels.seat_keys import seat_keys


class SeatSelections:
    """Selections by layer and seat.

    Args:
        device: where they are.

    Attributes:
        indices: `[layers, seats, Hkv, N]` int32, logical positions.
        counts: `[layers, seats, Hkv]` int32; `READS_ALL` where a layer reads everything.
        slots: where those positions lie in the pool, as `indices`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layers: tuple[int, ...] = ()
        self.indices = torch.zeros(0, 0, 0, 0, dtype=torch.int32, device=device)
        self.slots, self.counts = self.indices, self.indices.sum(-1, dtype=torch.int32)

    def resize(self, layers: tuple[int, ...], *, seats: int, heads: int, width: int) -> bool:
        """Make room, and return whether what was there still is, at the same seats."""
        old, shape = self.indices, (len(layers), seats, heads, width)
        stays = layers == self._layers and heads == old.shape[2] and seats >= old.shape[1]
        stays = stays and width >= old.shape[3]
        if stays and shape == tuple(old.shape):
            return True
        kept = self.indices, self.slots, self.counts
        self._layers = layers
        self.counts = torch.full(shape[:3], READS_ALL, dtype=torch.int32, device=self.device)
        self.indices = self.counts.new_zeros(shape)
        self.slots = torch.zeros_like(self.indices)
        if stays:
            for new, known in zip((self.indices, self.slots), kept, strict=False):
                new[:, : old.shape[1], :, : old.shape[3]] = known
            self.counts[:, : old.shape[1]] = kept[2]
        return stays

    def load(
        self, changed: list[tuple[int, Mapping[int, Selection]]], block_table: Tensor,
        block_size: int,
    ) -> None:  # fmt: skip
        """Write what seats read from now on, and look up where it lies.

        Args:
            changed: seats, and the selections of their requests.
            block_table: `[seats, P]`, the blocks of each.
            block_size: tokens of a block.
        """
        if not changed:
            return
        # Those that were chosen together lie together, and are copied together.
        alone: list[tuple[int, Mapping[int, Selection]]] = []
        together: dict[int, list[tuple[int, ChosenPart]]] = {}
        for number, selections in changed:
            if isinstance(selections, ChosenPart) and selections.chosen.layers == self._layers:
                together.setdefault(id(selections.chosen), []).append((number, selections))
            else:
                alone.append((number, selections))
        shared = [pair for group in together.values() for pair in group]
        places = [0] * len(alone) + [part.place for _, part in shared]
        table = on_device([[number for number, _ in [*alone, *shared]], places], self.device)
        at = len(alone)
        for number, selections in alone:
            self._load_one(number, selections)
        if alone:
            self._look_up(table[0, :at], block_table, block_size)
        for group in together.values():
            seats, rows = table[:, at : at + len(group)]
            self._load_many(group[0][1].chosen, seats, rows, block_table, block_size)
            at += len(group)

    def put(self, chosen: ChosenKeys, seats: Tensor, block_table: Tensor, block_size: int) -> None:
        """Write what was chosen for `seats` `[B]`, in their order, as `load` does."""
        self._load_many(chosen, seats, None, block_table, block_size)

    def skip(self, seats: Tensor, is_away: Tensor, block_size: int) -> None:
        """Leave out what lies in blocks that are away; what stays keeps its order.

        Args:
            seats: `[B]`, whose layers all have chosen keys.
            is_away: `[B, P]` bool, by logical block.
            block_size: tokens of a block.
        """
        found = [self.indices[:, seats], self.slots[:, seats]]
        pages = (found[0] // block_size).long()
        away = is_away[None, :, None].expand(*pages.shape[:3], -1).gather(3, pages)
        places = torch.arange(pages.shape[3], device=self.device)
        out = away | (places >= self.counts[:, seats].unsqueeze(-1))
        order = out.to(torch.int8).argsort(dim=-1, stable=True)
        for held, own in zip((self.indices, self.slots), found, strict=True):
            held[:, seats] = own.gather(3, order)
        self.counts[:, seats] = (~out).sum(-1, dtype=torch.int32)

    def taken(self, seats: Tensor, lengths: Tensor) -> ChosenKeys:
        """Return copies of what `seats` read, chosen when they had `lengths` tokens."""
        return ChosenKeys(self._layers, self.indices[:, seats], self.counts[:, seats], lengths)

    def _look_up(self, where: Tensor, block_table: Tensor, block_size: int) -> None:
        layers, heads = self.indices.shape[0:3:2]
        chosen = self.indices[:, where].transpose(0, 1).reshape(len(where), layers * heads, -1)
        found = slots_of(chosen, block_table[where], block_size)
        self.slots[:, where] = found.unflatten(1, (layers, heads)).transpose(0, 1)

    def _load_many(
        self, chosen: ChosenKeys, seats: Tensor, places: Tensor | None, block_table: Tensor,
        block_size: int,
    ) -> None:  # fmt: skip
        seat_keys(
            chosen.indices, chosen.counts, seats=seats, places=places, block_table=block_table,
            block_size=block_size, indices=self.indices, counts=self.counts, slots=self.slots,
        )  # fmt: skip

    def _load_one(self, number: int, selections: Mapping[int, Selection]) -> None:
        given = [selections[i] for i in self._layers if i in selections]
        if len(given) == len(self._layers) and len({s.indices.shape[2] for s in given}) == 1:
            width = given[0].indices.shape[2]
            self.indices[:, number, :, :width] = torch.cat([s.indices for s in given])
            self.counts[:, number] = torch.cat([s.counts for s in given])
            return
        self.counts[:, number] = READS_ALL
        for place, index in enumerate(self._layers):
            if index in selections:
                one = selections[index]
                self.indices[place, number, :, : one.indices.shape[2]] = one.indices[0]
                self.counts[place, number] = one.counts[0]


def width_of(selections: Mapping[int, Selection]) -> int:
    """Return the widest layer's N."""
    if isinstance(selections, ChosenPart):
        return int(selections.chosen.indices.shape[3])
    return max((s.indices.shape[2] for s in selections.values()), default=0)
