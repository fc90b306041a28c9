"""The tokens of every row so far, in one buffer that drafts are written into ahead of time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths, on_device


class History:
    """Token ids `[B, capacity]` and the committed length of each row.

    Lengths count from the left edge of the padded prompt, as Hugging Face's `input_ids` do. What
    lies past a row's length is scratch: drafts are written there, so that a logits rule sees them
    as history, and overwritten when the verdict is known.
    """

    def __init__(self, prompt: Tensor, capacity: int, fill: int) -> None:
        batch, length = prompt.shape
        self.ids = torch.full(
            (batch, max(capacity, length)), fill, dtype=torch.int64, device=prompt.device
        )
        self.ids[:, :length] = prompt
        self.prompt_length = length
        self.lengths = [length] * batch
        # What was committed after the prompt, so that nobody has to ask the device.
        self._new: list[list[int]] = [[] for _ in range(batch)]
        self._ends: tuple[list[int], Tensor] | None = None

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.lengths)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens a row, scratch included."""
        missing = capacity - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.cat([self.ids, self.ids.new_zeros(self.batch, missing)], dim=1)

    def ends(self) -> Tensor:
        """Return the lengths on the device, `[B]` int64."""
        held = self._ends
        if held is None or held[0] != self.lengths:
            grown = set() if held is None else set(map(int.__sub__, self.lengths, held[0]))
            if held is not None and len(grown) == 1:
                # Computed where they are: cheaper than a copy from the host.
                ends = held[1] + grown.pop()
            else:
                ends = on_device(self.lengths, self.ids.device)
            held = self._ends = list(self.lengths), ends
        return held[1]

    def last_tokens(self) -> Tensor:
        """Return the newest committed token of each row, `[B, 1]`."""
        return self.ids.gather(1, (self.ends() - 1).unsqueeze(1))

    def token(self, row: int, length: int) -> int:
        """Return the last of a row's first `length` tokens, which was committed after the prompt.

        Raises:
            IndexError: it was not.
        """
        place = length - 1 - self.prompt_length
        if place < 0:
            raise IndexError(f"token {length} of row {row} belongs to the prompt")
        return self._new[row][place]

    def at_positions(self, lengths: RowLengths) -> Tensor:
        """Return the token at each position of a cache, `[B, longest + 1]`; -1 where unknown.

        Args:
            lengths: of a cache that holds all but the newest token of each row; what comes before
                the text (padding that it left out, a prompt of embeddings) is unknown.
        """
        ends = self.ends() - 1 - lengths.tensor
        place = ends.unsqueeze(-1) + torch.arange(lengths.max + 1, device=self.ids.device)
        known = (place >= 0) & (place < self.ids.shape[1])
        return self.ids.gather(1, place * known).masked_fill(~known, -1)

    def sketch(self, offset: int, tokens: Tensor) -> None:
        """Write `tokens` `[B]` at `offset` past each row's end, without committing them."""
        self.ids.scatter_(1, (self.ends() + offset).unsqueeze(1), tokens.unsqueeze(1))

    def commit(self, row: int, tokens: list[int]) -> None:
        """Append `tokens` to a row."""
        self.commit_rows({row: tokens})

    def commit_rows(self, chosen: Mapping[int, list[int]]) -> None:
        """Append to each row the tokens that it chose; one transfer serves all of them."""
        written = [
            (row, self.lengths[row] + i, token)
            for row, tokens in chosen.items()
            for i, token in enumerate(tokens)
        ]
        if written:
            rows, places, values = on_device(written, self.ids.device).unbind(1)
            self.ids[rows, places] = values
        for row, tokens in chosen.items():
            self._new[row].extend(tokens)
            self.lengths[row] += len(tokens)

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        self.lengths[row] = min(self.lengths[row], length)
        del self._new[row][max(length - self.prompt_length, 0) :]
