"""The logits of a pass: the rows of all requests in one tensor, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import overload

from torch import Tensor


class PassLogits(Sequence[Tensor]):
    """Each segment's last rows of logits, `[keep, V]`, in the order of the segments.

    Args:
        rows: `[R, V]` fp32; some may be nobody's.
        spans: each segment's first row, and how many it has.
    """

    def __init__(self, rows: Tensor, spans: list[tuple[int, int]]) -> None:
        self.rows, self.spans = rows, spans

    @classmethod
    def in_order(cls, rows: Tensor, counts: list[int]) -> PassLogits:
        """Return logits that lie one segment after the other, `counts` rows each."""
        starts = accumulate(counts, initial=0)
        return cls(rows, list(zip(starts, counts, strict=False)))

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        """Return one segment's rows, or those of several."""
        if isinstance(index, slice):
            return [self.rows[at : at + count] for at, count in self.spans[index]]
        at, count = self.spans[index]
        return self.rows[at : at + count]

    def __len__(self) -> int:
        return len(self.spans)
