"""The keys that the drafts of a round read, gathered once and kept side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths, Selection
from pillarattn.kernels.draft_attention.reference import attend, gather_rows
from pillarattn.kernels.softmax import accumulation_dtype

# Columns for the tokens of a round, at first.
MIN_ROOM = 8


class KeptKeys:
    """Keys and values of one layer's selection, `[B, Hkv, N + room, D]`, and of the tokens since.

    The selection does not change while a round drafts: one copy of N keys serves all its steps, and
    each step is a small dense product. Columns 0..N-1 are the selected keys; column N + j is
    position `tail_start + j`, so that ragged rows stand side by side. On a CPU the copy costs less
    than to gather at every step; a GPU gathers inside its kernel and has no use for it.

    Args:
        selection: the keys of the round.
        keys: `[B, Hkv, S, D]`, the layer's.
        values: `[B, Hkv, S, Dv]`, likewise.
        tail: tokens of each row past `selection.tail_start` that the layer holds.

    Raises:
        ValueError: a selected position is outside the cache.
    """

    def __init__(self, selection: Selection, keys: Tensor, values: Tensor, tail: int) -> None:
        self.selection = selection
        self.starts: list[int] = selection.tail_start.tolist()
        self.width = selection.indices.shape[2]
        self.room = max(MIN_ROOM, 2 * tail)
        self.filled = tail
        used = torch.arange(self.width, device=keys.device) < selection.counts.unsqueeze(-1)
        positions = selection.indices.long()
        self.visible: Tensor | None = None
        if not bool(used.all()):
            # What stands past a count is garbage: an index that may not be read.
            positions = positions.masked_fill(~used, 0)
            every = used.new_ones(*used.shape[:2], self.room)
            self.visible = torch.cat([used, every], dim=-1).unsqueeze(2)
        # Columns of tokens to come copy what they must not show, and are written before a read.
        ahead = selection.tail_start.unsqueeze(1) + torch.arange(self.room, device=keys.device)
        ahead = ahead.clamp_max(keys.shape[2] - 1).unsqueeze(1).expand(-1, keys.shape[1], -1)
        positions = torch.cat([positions, ahead], dim=-1)
        dtype = accumulation_dtype(keys.dtype)
        self.keys, self.values = (gather_rows(t, positions).to(dtype) for t in (keys, values))
        if self.visible is not None:
            # An empty row has nothing at position 0, and 0 * NaN is NaN.
            hidden = ~self.visible.transpose(2, 3)
            self.keys.masked_fill_(hidden, 0.0)
            self.values.masked_fill_(hidden, 0.0)

    def tail_of(self, lengths: RowLengths) -> int | None:
        """Return how many tokens rows of `lengths` hold since the choice; None if they differ."""
        tail = lengths.host[0] - self.starts[0]
        for length, start in zip(lengths.host, self.starts, strict=True):
            if length - start != tail:
                return None
        return tail

    def extend(self, base: RowLengths, new_keys: Tensor, new_values: Tensor) -> bool:
        """Take over tokens that the layer appended at `base`; return whether they have a place."""
        at = self.tail_of(base)
        if at is None or not 0 <= at <= self.filled or at + new_keys.shape[2] > self.room:
            return False
        column = self.width + at
        end = column + new_keys.shape[2]
        self.keys[:, :, column:end] = new_keys
        self.values[:, :, column:end] = new_values
        self.filled = at + new_keys.shape[2]
        return True

    def cut(self, lengths: RowLengths) -> None:
        """Forget the tokens past `lengths`."""
        least = min(length - start for length, start in zip(lengths.host, self.starts, strict=True))
        self.filled = min(self.filled, least)

    def attend(
        self,
        query: Tensor,
        tail: int,
        *,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend from `query` `[B, Hq, 1, D]` to the selection and the first `tail` tokens since.

        Options and result are those of `kernels.draft_attention`.
        """
        end = self.width + tail
        return attend(
            query,
            self.keys[:, :, :end],
            self.values[:, :, :end],
            visible=None if self.visible is None else self.visible[..., :end],
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap,
            sinks=sinks,
        )
