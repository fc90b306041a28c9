"""Selections of layers that were chosen together, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths, Selection


def by_layer(
    indices: list[int], chosen: Tensor, counts: Tensor, lengths: RowLengths
) -> dict[int, Selection]:
    """Return the selections of layers that were chosen together.

    Args:
        indices: numbers of the layers.
        chosen, counts: `[L * B, Hkv, N]` and `[L * B, Hkv]` int32, layer by layer.
        lengths: of the B rows.
    """
    batch = len(lengths.host)
    parts = torch.split(chosen, batch)
    if not chosen.is_cuda and len(indices) > 1 and counts.numel():
        # Where a budget moves between layers, narrow ones are not gathered like the widest.
        widths = counts.reshape(len(indices), -1).amax(dim=1).tolist()
        parts = tuple(part[..., :n] for part, n in zip(parts, widths, strict=True))
    return {
        index: Selection(keys, count, lengths.tensor)
        for index, keys, count in zip(indices, parts, torch.split(counts, batch), strict=True)
    }


def nothing_chosen(indices: list[int], lengths: RowLengths) -> dict[int, Selection]:
    """Return selections that only mark layers as sparse: their keys are chosen at draft steps."""
    tail_start = lengths.tensor
    empty = torch.zeros(len(tail_start), 1, 0, dtype=torch.int32, device=tail_start.device)
    return {i: Selection(empty, empty.sum(-1, dtype=torch.int32), tail_start) for i in indices}
