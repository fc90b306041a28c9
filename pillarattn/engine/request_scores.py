"""The row scores of one request's verify pass, cut out of what all requests share when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.modules.score_buffer import ScoreBuffer


class RequestScores(ScoreBuffer):
    """A score buffer of one row, whose layers may lie in `StepBuffers` until the next pass.

    Attributes:
        place: where they lie there; None: they do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place: int | None = None
        self._shared: dict[int, Tensor] = {}
        self._rows, self._length = 0, 0

    def lend(self, layers: dict[int, Tensor], place: int, *, rows: int, length: int) -> None:
        """Say where the scores lie: at `place` of each layer's `[places, Hkv, Q, S]`.

        Args:
            layers: by number.
            place: the request's.
            rows: verify rows that are the request's.
            length: its tokens, those rows included.
        """
        self._shared, self.place, self._rows, self._length = layers, place, rows, length

    @property
    def shared(self) -> Mapping[int, Tensor]:
        """Scores of the whole pass by layer, `[places, Hkv, Q, S]` each."""
        return self._shared

    def __contains__(self, layer_index: int) -> bool:
        return layer_index in self._shared or super().__contains__(layer_index)

    def take(self, layer_index: int) -> Tensor:
        """See `ScoreBuffer`."""
        self._cut([layer_index])
        return super().take(layer_index)

    def pool(self, layer_indices: list[int], **options: Any) -> Tensor:
        """See `ScoreBuffer`."""
        self._cut(layer_indices)
        return super().pool(layer_indices, **options)

    def rows_of(self, layer_indices: list[int], *, end: int) -> Callable[[Tensor], Tensor]:
        """See `ScoreBuffer`."""
        self._cut(layer_indices)
        return super().rows_of(layer_indices, end=end)

    def _cut(self, layer_indices: list[int]) -> None:
        missing = [i for i in layer_indices if i not in self._layers and i in self._shared]
        if missing and self.place is not None:
            lengths = RowLengths([self._length], self._shared[missing[0]].device)
            for index in missing:
                own = self._shared[index][self.place : self.place + 1]
                self.put(index, own[:, :, : self._rows, : self._length], lengths)
