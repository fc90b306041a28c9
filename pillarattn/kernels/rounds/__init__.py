"""Rounds on the device: a step's rows from where requests stand, and what a pass makes of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_one_device
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.rounds import reference

__all__ = ["Spans", "judge_rounds", "place_rows"]

# A position that no request reaches.
MOST = 2**31 - 1

for _name in ("place_rows", "judge_rounds"):
    register(_name, "reference", getattr(reference, _name))
    register(_name, "triton", f"pillarattn.kernels.rounds.triton_kernel:{_name}")


class Spans(NamedTuple):
    """Where a pass has its integers: the first one of each name.

    Attributes:
        tokens, positions, slots: of each row.
        lengths, tail_start, drafting: of each seat.
    """

    tokens: int
    positions: int
    slots: int
    lengths: int
    tail_start: int
    drafting: int


def place_rows(
    ints: Tensor,
    blank: Tensor,
    base: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    *,
    seats: Tensor,
    offsets: Tensor,
    spare: Tensor,
    moving: Tensor,
    ends: Tensor,
    begun: Tensor,
    spans: Spans,
    block_size: int,
    last: int = MOST,
    implementation: str = "auto",
) -> None:
    """Write a pass's integers: `blank`, and what grows from step to step.

    Args:
        ints: `[n]` int64, written.
        blank: `[n]` int64, what does not grow; of `drafting`, 1 where a seat's row drafts.
        base: `[S]` int64, position of each seat's newest token.
        tokens: `[S, W]` int64, that token and those after it.
        block_table: `[S, P]` int32, the blocks of each seat.
        seats, offsets, spare: `[R]` int64: whose a row is, its place behind the newest token, and
            what is added to its slot.
        moving, ends: `[S]` int64: a seat's length is `base * moving + ends`.
        begun: `[S]` int64, tokens with keys when a seat's keys were chosen: where its tail begins.
        spans: where in `ints` it goes.
        block_size: tokens of a block.
        last: the largest position that the model takes, and the one that rows behind it are given.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Raises:
        ValueError: a dtype or device is wrong, or lengths do not fit each other.
    """
    given = {
        "ints": ints, "blank": blank, "base": base, "tokens": tokens, "seats": seats,
        "offsets": offsets, "spare": spare, "moving": moving, "ends": ends, "begun": begun,
    }  # fmt: skip
    _check_int64(**given)
    check_one_device(block_table=block_table, **given)
    if len(ints) != len(blank) or not len(seats) == len(offsets) == len(spare):
        raise ValueError(
            f"ints and blank, and what rows have, must be equally long, got {len(ints)} and "
            f"{len(blank)}, and {len(seats)}, {len(offsets)} and {len(spare)}"
        )
    lengths = {len(t) for t in (base, tokens, moving, ends, begun, block_table)}
    if len(lengths) > 1:
        raise ValueError(
            f"what seats have must be equally long, got base {len(base)}, tokens {len(tokens)}, "
            f"moving {len(moving)}, ends {len(ends)}, begun {len(begun)} and block_table "
            f"{len(block_table)}"
        )
    compute = choose("place_rows", implementation, ints, blank, base, tokens, block_table)
    compute(
        ints, blank, base, tokens, block_table, seats=seats, offsets=offsets, spare=spare,
        moving=moving, ends=ends, begun=begun, spans=spans, block_size=block_size, last=last,
    )  # fmt: skip


def judge_rounds(
    drawn: Tensor,
    tokens: Tensor,
    base: Tensor,
    begun: Tensor,
    *,
    rows: Tensor,
    seats: Tensor,
    real: Tensor,
    draft_places: Tensor,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Judge the drafts of those who verify, and put down where all of them go on.

    Args:
        drawn: `[R]` int64, the token of each row, -1 where none is possible.
        tokens: `[S, k + 1]` int64, each seat's newest token and its drafts; written.
        base: `[S]` int64, position of the newest token; written.
        begun: `[S]` int64, written: keys are chosen anew where a round has ended, up to `base`.
        rows: `[V, k + 1]` int64, the rows of each place that is judged.
        seats: `[V]` int64, whose.
        real: `[V]` int64, 1; 0 is a place of nobody, in the last seat, which stays where it is.
        draft_places: `[R]` int64, where in `tokens` a row's token goes, flat. Rows that do not
            draft share a place that nobody reads.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[V, 2 k + 1]` int64, what the rows gave and the drafts that they were compared with;
        `[V]` int64, position of the newest token after it; `[V]` int64, tokens that came of it.

    Raises:
        ValueError: a dtype, device or shape is wrong.
    """
    given = {
        "drawn": drawn, "tokens": tokens, "base": base, "begun": begun, "rows": rows,
        "seats": seats, "real": real, "draft_places": draft_places,
    }  # fmt: skip
    _check_int64(**given)
    check_one_device(**given)
    if tuple(rows.shape) != (len(seats), tokens.shape[1]) or len(seats) != len(real):
        raise ValueError(
            f"rows must be [V, k + 1] = [{len(seats)}, {tokens.shape[1]}] and real [V], got "
            f"{list(rows.shape)} and {list(real.shape)}"
        )
    compute = choose("judge_rounds", implementation, drawn, tokens, base)
    found: tuple[Tensor, Tensor, Tensor] = compute(
        drawn, tokens, base, begun, rows=rows, seats=seats, real=real, draft_places=draft_places
    )
    return found


def _check_int64(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be int64 and contiguous, got {tensor.dtype}")
