"""Chosen keys at their seats in plain PyTorch: three writes, and a look-up between them."""

from __future__ import annotations

from torch import Tensor

from pillarattn.kernels.mixed_attention.work_list import slots_of


def seat_keys(
    chosen: Tensor,
    numbers: Tensor,
    *,
    seats: Tensor,
    places: Tensor | None,
    block_table: Tensor,
    block_size: int,
    indices: Tensor,
    counts: Tensor,
    slots: Tensor,
) -> None:
    """Compute `kernels.seat_keys.seat_keys`."""
    if places is not None:
        chosen, numbers = chosen.index_select(1, places), numbers.index_select(1, places)
    layers, rows, heads, width = chosen.shape
    where = seats.long()
    indices[..., :width].index_copy_(1, where, chosen)
    counts.index_copy_(1, where, numbers)
    lines = chosen.transpose(0, 1).reshape(rows, layers * heads, width)
    found = slots_of(lines, block_table[where], block_size).view(rows, layers, heads, width)
    slots[..., :width].index_copy_(1, where, found.transpose(0, 1))
