"""Chosen keys at their seats in Triton: a program reads a stretch of positions once (README.md)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Positions of a program.
SPAN = 1024

# What changes from pass to pass: none of it makes another kernel.
_SIZES = ("rows", "held", "pages", "kept")
_POINTERS = ("seats", "places", "table")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def seat_kernel(
    chosen, numbers, seats, places, table, indices, counts, slots,
    stride_cl, stride_cr, stride_ch, stride_nl, stride_nr, stride_nh, stride_tb,
    rows, held, pages, kept, width,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HAS_PLACES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write one stretch of one head's positions in one layer, and their slots."""
    line = tl.program_id(0)
    h = (line % HEADS).to(tl.int64)
    r = line // HEADS % rows
    layer = (line // HEADS // rows).to(tl.int64)
    seat = tl.load(seats + r).to(tl.int64)
    row = r.to(tl.int64)
    if HAS_PLACES:
        row = tl.load(places + r).to(tl.int64)
    goal = (layer * held + seat) * HEADS + h
    if tl.program_id(1) == 0:
        number = tl.load(numbers + layer * stride_nl + row * stride_nr + h * stride_nh)
        tl.store(counts + goal, number)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = at < kept
    source = chosen + layer * stride_cl + row * stride_cr + h * stride_ch
    position = tl.load(source + at, mask=inside, other=0)
    # Undefined positions may be negative, where quotients and remainders are not as in PyTorch.
    block = tl.minimum(tl.maximum(position // BLOCK, 0), pages - 1)
    rest = position % BLOCK
    rest = tl.where(rest < 0, rest + BLOCK, rest)
    found = tl.load(table + seat * stride_tb + block, mask=inside, other=0)
    slot = (found * BLOCK + rest).to(tl.int32)
    tl.store(indices + goal * width + at, position, mask=inside)
    tl.store(slots + goal * width + at, slot, mask=inside)


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
    """Compute `kernels.seat_keys.seat_keys`; reads nothing on the host."""
    layers, held, heads, width = indices.shape
    rows, kept = len(seats), chosen.shape[3]
    if not layers * rows * heads:
        return
    if chosen.stride(3) != 1 and kept > 1:
        chosen = chosen.contiguous()
    if block_table.stride(1) != 1 and block_table.shape[1] > 1:
        block_table = block_table.contiguous()
    with torch.cuda.device_of(chosen):
        # One stretch at least, which writes the number.
        seat_kernel[(layers * rows * heads, max(1, triton.cdiv(kept, SPAN)))](
            chosen, numbers, seats.contiguous(), None if places is None else places.contiguous(),
            block_table, indices, counts, slots,
            *chosen.stride()[:3], *numbers.stride(), block_table.stride(0),
            rows, held, block_table.shape[1], kept, width,
            HEADS=heads, BLOCK=block_size, HAS_PLACES=places is not None, SPAN=SPAN,
        )  # fmt: skip
