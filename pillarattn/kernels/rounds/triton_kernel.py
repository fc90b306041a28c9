"""Rounds in Triton: one launch before a pass, one after it (README.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two

if TYPE_CHECKING:
    from pillarattn.kernels.rounds import Spans

# Integers of a program.
BLOCK = 256


# Sizes and alignments change with the number of requests: none of them makes another kernel.
_PLACED = (
    "ints", "blank", "base", "tokens", "block_table", "seats", "offsets", "spare", "moving", "ends",
    "begun",
)  # fmt: skip
_PLACED_SIZES = (
    "count", "rows", "held", "width", "pages", "tokens_at", "positions_at", "slots_at",
    "lengths_at", "tail_at", "drafting_at", "last",
)  # fmt: skip
_JUDGED = (
    "drawn", "tokens", "base", "begun", "rows", "seats", "real", "draft_places", "report", "after",
    "emitted",
)  # fmt: skip


@triton.jit(do_not_specialize=_PLACED_SIZES, do_not_specialize_on_alignment=_PLACED)
def place_kernel(
    ints, blank, base, tokens, block_table, seats, offsets, spare, moving, ends, begun,
    count, rows, held, width, pages, block_size,
    tokens_at, positions_at, slots_at, lengths_at, tail_at, drafting_at, last,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a stretch of `blank` with what seats have, or place a stretch of rows."""
    copies = tl.cdiv(count, BLOCK)
    line = tl.program_id(0)
    if line < copies:
        at = line * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        value = tl.load(blank + at, mask=inside, other=0)
        seat = at - lengths_at
        is_length = (seat >= 0) & (seat < held)
        grown = tl.load(base + seat, mask=is_length, other=0)
        grown = grown * tl.load(moving + seat, mask=is_length, other=0)
        grown += tl.load(ends + seat, mask=is_length, other=0)
        value = tl.where(is_length, grown, value)
        seat = at - tail_at
        is_tail = (seat >= 0) & (seat < held)
        tail = tl.load(begun + seat, mask=is_tail, other=0)
        tail = tail * tl.load(blank + drafting_at + seat, mask=is_tail, other=0)
        value = tl.where(is_tail, tail, value)
        # Other programs write these.
        is_row = (at >= tokens_at) & (at < tokens_at + rows)
        is_row = is_row | ((at >= positions_at) & (at < positions_at + rows))
        is_row = is_row | ((at >= slots_at) & (at < slots_at + rows))
        tl.store(ints + at, value, mask=inside & (is_row == 0))
    else:
        row = (line - copies) * BLOCK + tl.arange(0, BLOCK)
        is_there = row < rows
        owner = tl.load(seats + row, mask=is_there, other=0)
        offset = tl.load(offsets + row, mask=is_there, other=0)
        position = tl.load(base + owner, mask=is_there, other=0) + offset
        token = tl.load(tokens + owner * width + offset, mask=is_there, other=0)
        page = owner * pages + position // block_size
        block = tl.load(block_table + page, mask=is_there, other=0).to(tl.int64)
        slot = block * block_size + position % block_size
        slot += tl.load(spare + row, mask=is_there, other=0)
        tl.store(ints + tokens_at + row, token, mask=is_there)
        tl.store(ints + positions_at + row, tl.minimum(position, last), mask=is_there)
        tl.store(ints + slots_at + row, slot, mask=is_there)


def place_rows(
    ints: Tensor, blank: Tensor, base: Tensor, tokens: Tensor, block_table: Tensor, *,
    seats: Tensor, offsets: Tensor, spare: Tensor, moving: Tensor, ends: Tensor, begun: Tensor,
    spans: Spans, block_size: int, last: int,
) -> None:  # fmt: skip
    """Compute `kernels.rounds.place_rows`."""
    count, rows = len(ints), len(seats)
    with torch.cuda.device_of(ints):
        place_kernel[(triton.cdiv(count, BLOCK) + triton.cdiv(rows, BLOCK),)](
            ints, blank, base, tokens, block_table, seats, offsets, spare, moving, ends, begun,
            count, rows, len(base), tokens.shape[1], block_table.shape[1], block_size, *spans,
            last, BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=("places", "count", "width", "stride_report"),
    do_not_specialize_on_alignment=_JUDGED,
)
def judge_kernel(
    drawn, tokens, base, begun, rows, seats, real, draft_places, report, after, emitted,
    places, count, width, stride_report,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Judge one place, or put down a stretch of drafts."""
    place = tl.program_id(0)
    if place < places:
        i = tl.arange(0, WIDE)
        seat = tl.load(seats + place)
        is_real = tl.load(real + place)
        row = tl.load(rows + place * width + i, mask=i < width, other=0)
        given = tl.load(drawn + row, mask=i < width, other=0)
        draft = tl.load(tokens + seat * width + 1 + i, mask=i < width - 1, other=0)
        stands = tl.min(tl.where((given == draft) & (i < width - 1), WIDE, i), 0)
        newest = tl.sum(tl.where(i == stands, given, 0), 0)
        end = tl.load(base + seat) + (stands + 1) * is_real
        line = report + place.to(tl.int64) * stride_report
        tl.store(line + i, given, mask=i < width)
        tl.store(line + width + i, draft, mask=i < width - 1)
        tl.store(after + place, end)
        tl.store(emitted + place, (stands + 1).to(tl.int64))
        tl.store(base + seat, end)
        tl.store(begun + seat, end)
        tl.store(tokens + seat * width, tl.maximum(newest, 0) * is_real)
    elif width > 1:
        row = (place - places) * BLOCK + tl.arange(0, BLOCK)
        inside = row < count
        token = tl.load(drawn + row, mask=inside, other=0)
        where = tl.load(draft_places + row, mask=inside, other=0)
        tl.store(tokens + where, tl.maximum(token, 0), mask=inside)


def judge_rounds(
    drawn: Tensor, tokens: Tensor, base: Tensor, begun: Tensor, *, rows: Tensor, seats: Tensor,
    real: Tensor, draft_places: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `kernels.rounds.judge_rounds`."""
    places, width = rows.shape
    report = drawn.new_empty(places, 2 * width - 1)
    after, emitted = drawn.new_empty(2, places)
    with torch.cuda.device_of(drawn):
        judge_kernel[(places + triton.cdiv(len(drawn), BLOCK),)](
            drawn, tokens, base, begun, rows, seats, real, draft_places, report, after, emitted,
            places, len(drawn), width, report.stride(0), WIDE=power_of_two(width), BLOCK=BLOCK,
        )  # fmt: skip
    return report, after, emitted
