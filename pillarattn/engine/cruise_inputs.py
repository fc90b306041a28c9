"""What the steps of a cruise do the same each time: copied to the device once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pillarattn.engine.batched_draws import DrawKind
from pillarattn.engine.cruise_schedule import Integers, StepRows
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.step_buffers import StepBuffers


@dataclass(frozen=True)
class StepInputs:
    """One kind of step.

    Attributes:
        rows: who moves.
        padded, live: rows of the pass, those of nobody included, and without them.
        is_scored: whether those who verify leave scores.
        blank: the buffers' integers without what grows from step to step.
        seats, offsets, spare: of each row: whose it is, its place behind the newest token, and
            where a row of nobody lies in the scratch block.
        token_places: of each row, in the tokens of the rounds.
        moving, ends: of each seat: whether it has rows, and how far behind the newest token they
            end, or the rows of nobody.
        draft_rows, draft_places: rows that draft, and where in the rounds their tokens go.
        verify_rows: `[V * (k + 1)]`, and `verify_seats` `[V]`, whose.
        newest_places: where in the rounds the tokens after those go.
        draws: rows by kind; None: all of them.
    """

    rows: StepRows
    padded: int
    live: int
    is_scored: bool
    blank: Tensor
    seats: Tensor
    offsets: Tensor
    spare: Tensor
    token_places: Tensor
    moving: Tensor
    ends: Tensor
    draft_rows: Tensor
    draft_places: Tensor
    verify_rows: Tensor
    verify_seats: Tensor
    newest_places: Tensor
    draws: list[tuple[DrawKind, Tensor | None]]

    def load(self, buffers: StepBuffers, base: Tensor, tokens: Tensor) -> MixedStep:
        """Fill the buffers in for a step, all of it on the device.

        Args:
            buffers: whose tables and selections hold.
            base: `[seats]`, position of each request's newest token.
            tokens: `[seats, k + 1]`, that token and the drafts after it.
        """
        named, size, rows = buffers.named, buffers.block_size, self.padded
        buffers.ints.copy_(self.blank)
        positions = torch.add(base[self.seats], self.offsets, out=named["positions"][:rows])
        torch.index_select(tokens.view(-1), 0, self.token_places, out=named["tokens"][:rows])
        places = self.seats * buffers.sizes.pages + positions // size
        blocks = buffers.block_table.view(-1)[places]
        torch.add(blocks * size + positions % size, self.spare, out=named["slots"][:rows])
        torch.add(base * self.moving, self.ends, out=named["lengths"])
        # A round's selected keys end where the round begins.
        torch.mul(base, named["drafting"], out=named["tail_start"])
        buffers.side = 0
        return MixedStep(buffers, [], rows, is_steady=True, scored=self.is_scored, live=self.live)


def step_inputs(
    rows: StepRows, seats: Integers, kinds: Sequence[DrawKind], buffers: StepBuffers, *, k: int,
    is_scored: bool, padded: int,
) -> StepInputs:  # fmt: skip
    """Return a step's inputs, by one copy to the device.

    Args:
        rows: of requests in the order of their seats.
        seats: of each request.
        kinds: how each request's tokens are drawn.
        buffers: as large as the step needs.
        k: drafts of a round.
        is_scored: whether those who verify leave scores.
        padded: rows of the pass.
    """
    live, nobody = len(rows.owners), buffers.sizes.seats
    spare = np.arange(padded - live)
    row_seats = np.concatenate([seats[rows.owners], spare * 0 + nobody])
    offsets = np.concatenate([rows.offsets, spare * 0])
    blank = np.zeros(len(buffers.ints), dtype=np.int64)
    part = {name: blank[span] for name, span in buffers.spans.items()}
    counts = np.bincount(row_seats, minlength=nobody + 1)
    part["row_starts"][1:] = counts.cumsum()
    part["drafting"][seats[rows.drafting]] = k > 0
    part["scored"][:] = -1
    if is_scored:
        part["scored"][: len(rows.verifying)] = seats[rows.verifying]
    moving, ends = np.zeros_like(counts), np.zeros_like(counts)
    moving[seats[rows.owners]] = 1
    np.maximum.at(ends, row_seats[:live], rows.offsets + 1)
    ends[nobody] = len(spare)
    verify_seats = seats[rows.verifying]
    kinds_of_rows: dict[DrawKind, list[int]] = {}
    for row, owner in enumerate(rows.owners.tolist()):
        kinds_of_rows.setdefault(kinds[owner], []).append(row)
    width = k + 1
    own_rows = list(kinds_of_rows.values()) if len(kinds_of_rows) > 1 else []
    arrays = {
        "blank": blank, "seats": row_seats, "offsets": offsets,
        "spare": np.concatenate([rows.owners * 0, spare % buffers.block_size]),
        "token_places": row_seats * width + offsets, "moving": moving, "ends": ends,
        "draft_rows": rows.draft_rows,
        "draft_places": seats[rows.drafting] * width + rows.offsets[rows.draft_rows] + 1,
        "verify_rows": rows.verify_rows.ravel(), "verify_seats": verify_seats,
        "newest_places": verify_seats * width,
    }  # fmt: skip
    sent: list[Integers] = [*arrays.values(), *map(np.asarray, own_rows)]
    whole = buffers.sent(np.concatenate(sent)).to(buffers.device, non_blocking=True)
    held = whole.split([len(array) for array in sent])
    draws = list(zip(kinds_of_rows, held[len(arrays) :] if own_rows else [None], strict=True))
    named = dict(zip(arrays, held, strict=False))
    return StepInputs(rows, padded, live, is_scored, draws=draws, **named)
