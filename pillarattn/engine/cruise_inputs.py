"""What the steps of a cruise do the same each time, and where a step finds it."""

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
from pillarattn.kernels.rounds import Spans, place_rows


@dataclass(frozen=True)
class StepInputs:
    """One kind of step.

    Attributes:
        rows: who moves.
        padded, live: rows of the pass, those of nobody included, and without them.
        judged: places for those who verify, those of nobody included.
        ints: all that a `StepForm` of this size holds, on the device.
        draws: rows by kind; None: all of them.
    """

    rows: StepRows
    padded: int
    live: int
    judged: int
    ints: Tensor
    draws: list[tuple[DrawKind, Tensor | None]]


class StepForm:
    """Where the steps of one size find their inputs: at fixed addresses, which a recording reads.

    Places that are nobody's belong to the request of nobody, in the last seat.

    Args:
        padded, judged: see `StepInputs`.
        buffers: as large as the steps need.
        k: drafts of a round.

    Attributes:
        blank: the buffers' integers without what grows from step to step.
        seats, offsets, spare: of each row: whose it is, its place behind the newest token, and
            where a row of nobody lies in the scratch block.
        draft_places: of each row, where in the rounds the token goes that it drafts; that of a row
            which does not draft is nobody's.
        moving, ends: of each seat: whether it has rows, and how far behind the newest token they
            end, or the rows of nobody.
        verify_rows: `[judged * (k + 1)]`, and `verify_seats` `[judged]`, whose.
        real: `[judged]`, 0 for nobody's and 1 for the others.
    """

    def __init__(self, padded: int, judged: int, buffers: StepBuffers, *, k: int) -> None:
        self.padded, self.judged, self._k = padded, judged, k
        sizes = self.sizes(padded, judged, buffers, k=k)
        self._held = torch.zeros(sum(sizes.values()), dtype=torch.int64, device=buffers.device)
        self._named = dict(zip(sizes, self._held.split(list(sizes.values())), strict=True))

    def __getattr__(self, name: str) -> Tensor:
        """Return the integers of a name."""
        try:
            named: dict[str, Tensor] = self.__dict__["_named"]
            return named[name]
        except KeyError:
            raise AttributeError(name) from None

    @staticmethod
    def sizes(padded: int, judged: int, buffers: StepBuffers, *, k: int) -> dict[str, int]:
        """Return how many integers of each name there are, in their order."""
        seats = buffers.sizes.seats + 1
        return {
            "blank": len(buffers.ints), "seats": padded, "offsets": padded, "spare": padded,
            "draft_places": padded, "moving": seats, "ends": seats,
            "verify_rows": judged * (k + 1), "verify_seats": judged, "real": judged,
        }  # fmt: skip

    def fill(self, inputs: StepInputs) -> None:
        """Take the inputs of the coming step."""
        self._held.copy_(inputs.ints)

    def load(
        self, buffers: StepBuffers, base: Tensor, tokens: Tensor, begun: Tensor, *, scored: bool,
        pools: bool, live: int, last: int,
    ) -> MixedStep:  # fmt: skip
        """Fill the buffers in for a step, all of it on the device.

        Args:
            buffers: whose tables and selections hold.
            base: `[seats]`, position of each request's newest token.
            tokens: `[seats, k + 1]`, that token and the drafts after it.
            begun: `[seats]`, tokens with keys when each request's keys were chosen.
            scored: whether those who verify leave scores.
            pools: whether these are pooled over their rows.
            live: rows that are somebody's.
            last: the largest position that the model takes.
        """
        spans = Spans(**{name: buffers.spans[name].start for name in Spans._fields})
        place_rows(
            buffers.ints, self.blank, base, tokens, buffers.block_table, seats=self.seats,
            offsets=self.offsets, spare=self.spare, moving=self.moving, ends=self.ends,
            begun=begun, spans=spans, block_size=buffers.block_size,
            last=last,
        )  # fmt: skip
        buffers.side = 0
        return MixedStep(
            buffers, [], self.padded, is_steady=True, scored=scored, live=live,
            exact=scored and not keeps_lse(buffers, self._k), most_rows=self._k + 1,
            pools=scored and pools, keeps=self._k > 0,
        )  # fmt: skip


def step_inputs(
    rows: StepRows, seats: Integers, kinds: Sequence[DrawKind], buffers: StepBuffers, *, k: int,
    is_scored: bool, padded: int, judged: int,
) -> StepInputs:  # fmt: skip
    """Return a step's inputs, by one copy to the device.

    Args:
        rows: of requests in the order of their seats.
        seats: of each request.
        kinds: how each request's tokens are drawn.
        buffers: as large as the step needs.
        k: drafts of a round.
        is_scored: whether verify passes leave scores, and drafts what these need.
        padded, judged: see `StepInputs`.
    """
    live, nobody, width = len(rows.owners), buffers.sizes.seats, k + 1
    spare = np.arange(padded - live)
    row_seats = np.concatenate([seats[rows.owners], spare * 0 + nobody])
    offsets = np.concatenate([rows.offsets, spare * 0])
    counts = np.bincount(row_seats, minlength=nobody + 1)
    moving, ends = np.zeros_like(counts), np.zeros_like(counts)
    moving[seats[rows.owners]] = 1
    np.maximum.at(ends, row_seats[:live], rows.offsets + 1)
    ends[nobody] = len(spare)
    # Nobody's newest token is always the first one, and what is drafted after it is never read.
    draft_places = np.full(padded, nobody * width + k)
    draft_places[rows.draft_rows] = seats[rows.drafting] * width + offsets[rows.draft_rows] + 1
    empty = judged - len(rows.verifying)
    verify_rows = np.concatenate([rows.verify_rows.ravel(), np.zeros(empty * width, np.int64)])
    verify_seats = np.concatenate([seats[rows.verifying], np.full(empty, nobody)])
    arrays = {
        "blank": _blank(rows, seats, counts, buffers, k=k, is_scored=is_scored),
        "seats": row_seats, "offsets": offsets,
        "spare": np.concatenate([rows.owners * 0, spare % buffers.block_size]),
        "draft_places": draft_places,
        "moving": moving, "ends": ends, "verify_rows": verify_rows, "verify_seats": verify_seats,
        "real": (verify_seats != nobody).astype(np.int64),
    }  # fmt: skip
    kinds_of_rows: dict[DrawKind, list[int]] = {}
    for row, owner in enumerate(rows.owners.tolist()):
        kinds_of_rows.setdefault(kinds[owner], []).append(row)
    own_rows = list(kinds_of_rows.values()) if len(kinds_of_rows) > 1 else []
    sizes = StepForm.sizes(padded, judged, buffers, k=k)
    named = np.concatenate([arrays[name] for name in sizes])
    whole = np.concatenate([named, *map(np.asarray, own_rows)])
    held = buffers.sent(whole).to(buffers.device, non_blocking=True)
    ints, *parts = held.split([len(named), *map(len, own_rows)])
    draws = list(zip(kinds_of_rows, parts or [None], strict=True))
    return StepInputs(rows, padded, live, judged, ints, draws)


def _blank(
    rows: StepRows, seats: Integers, counts: Integers, buffers: StepBuffers, *, k: int,
    is_scored: bool,
) -> Integers:  # fmt: skip
    """Return the buffers' integers but for those that grow; `counts` are the rows of each seat."""
    blank = np.zeros(len(buffers.ints), dtype=np.int64)
    part = {name: blank[span] for name, span in buffers.spans.items()}
    part["row_starts"][1:] = counts.cumsum()
    part["drafting"][seats[rows.drafting]] = k > 0
    part["scored"][:] = -1
    verifying = seats[rows.verifying]
    if is_scored and keeps_lse(buffers, k):
        part["kept_place"][seats[rows.drafting]] = rows.offsets[rows.draft_rows] + 1
        part["score_place"][verifying] = np.arange(len(verifying)) + 1
    elif is_scored:
        part["scored"][: len(verifying)] = verifying
    return blank


def keeps_lse(buffers: StepBuffers, k: int) -> bool:
    """Whether all drafts of a round leave what the scores of its verify pass need."""
    return buffers.kept.width >= k
