"""Chosen keys at the seats of their requests, and where those keys lie in the pool: one launch."""

from __future__ import annotations

from torch import Tensor

from pillarattn.kernels.checks import (
    check_at_least,
    check_integers,
    check_one_device,
    check_shape,
    check_values,
)
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.seat_keys import reference

__all__ = ["seat_keys"]

register("seat_keys", "reference", reference.seat_keys)
register("seat_keys", "triton", "pillarattn.kernels.seat_keys.triton_kernel:seat_keys")


def seat_keys(
    chosen: Tensor,
    numbers: Tensor,
    *,
    seats: Tensor,
    places: Tensor | None = None,
    block_table: Tensor,
    block_size: int,
    indices: Tensor,
    counts: Tensor,
    slots: Tensor,
    implementation: str = "auto",
) -> None:
    """Write what was chosen to its seats, and the slots of it by their block tables.

        indices[l, seats[r], h, :N] = chosen[l, places[r], h]
        counts[l, seats[r], h] = numbers[l, places[r], h]
        slots[l, seats[r], h, :N] = block_table[seats[r], p // block_size] * block_size
                                    + p % block_size, of each p in chosen[l, places[r], h]

    Args:
        chosen: `[L, B, Hkv, N]` int32 logical positions; those past their number may be anything,
            and get a slot that means nothing, by an entry of the seat's own table.
        numbers: `[L, B, Hkv]` int32.
        seats: `[R]` integers. Of rows of one seat any may win, and each a part: the seats of
            nobody.
        places: `[R]` integers, rows of `chosen`; None: all of them in their order, R = B.
        block_table: `[S, P]` int32, the blocks of each seat; P >= 1.
        block_size: tokens of a block.
        indices, slots: `[L, S, Hkv, W]` int32 contiguous, W >= N; written.
        counts: `[L, S, Hkv]` int32 contiguous; written.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Raises:
        ValueError: a shape, dtype, device or (on the CPU) seat or place is wrong.
    """
    check_shape("indices", indices, (None,) * 4, "[L, S, Hkv, W]")
    layers, held, heads, width = indices.shape
    check_integers("chosen", chosen, (layers, None, heads, None), "[L, B, Hkv, N]")
    batch, rows = chosen.shape[1], len(seats)
    check_integers("numbers", numbers, (layers, batch, heads), "[L, B, Hkv]")
    check_integers("seats", seats, (batch if places is None else None,), "[R]")
    check_integers("block_table", block_table, (held, None), "[S, P]")
    check_integers("slots", slots, (layers, held, heads, width), "[L, S, Hkv, W]")
    check_integers("counts", counts, (layers, held, heads), "[L, S, Hkv]")
    check_at_least("block_size", block_size, 1)
    if chosen.shape[3] > width or not block_table.shape[1]:
        raise ValueError(
            f"chosen has N = {chosen.shape[3]} positions and indices have W = {width}; block_table "
            f"has {block_table.shape[1]} blocks: give W >= N and a block at least"
        )
    for name, tensor in (("indices", indices), ("counts", counts), ("slots", slots)):
        if tensor.dtype != chosen.dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous and {chosen.dtype}, got {tensor.dtype}")
    check_one_device(
        chosen=chosen, numbers=numbers, seats=seats, places=places, block_table=block_table,
        indices=indices, counts=counts, slots=slots,
    )  # fmt: skip
    check_values("seats", seats, minimum=0, maximum=held - 1)
    if places is not None:
        check_integers("places", places, (rows,), "[R]")
        check_values("places", places, minimum=0, maximum=batch - 1)
    write = choose("seat_keys", implementation, chosen, seats, block_table, indices)
    write(
        chosen, numbers, seats=seats, places=places, block_table=block_table,
        block_size=block_size, indices=indices, counts=counts, slots=slots,
    )  # fmt: skip
