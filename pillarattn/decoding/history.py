"""The tokens of every row so far, in one buffer that drafts are written into ahead of time."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths


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

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.lengths)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens a row, scratch included."""
        missing = capacity - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.cat([self.ids, self.ids.new_zeros(self.batch, missing)], dim=1)

    def last_tokens(self) -> Tensor:
        """Return the newest committed token of each row, `[B, 1]`."""
        last = torch.tensor(self.lengths, device=self.ids.device) - 1
        return self.ids.gather(1, last.unsqueeze(1))

    def at_positions(self, lengths: RowLengths) -> Tensor:
        """Return the token at each position of a cache, `[B, longest + 1]`; -1 where unknown.

        Args:
            lengths: of a cache that holds all but the newest token of each row; what comes before
                the text (padding that it left out, a prompt of embeddings) is unknown.
        """
        ends = torch.tensor(self.lengths, device=self.ids.device) - 1 - lengths.tensor
        place = ends.unsqueeze(-1) + torch.arange(lengths.max + 1, device=self.ids.device)
        known = (place >= 0) & (place < self.ids.shape[1])
        return self.ids.gather(1, place * known).masked_fill(~known, -1)

    def sketch(self, offset: int, tokens: Tensor) -> None:
        """Write `tokens` `[B]` at `offset` past each row's end, without committing them."""
        place = torch.tensor(self.lengths, device=self.ids.device) + offset
        self.ids.scatter_(1, place.unsqueeze(1), tokens.unsqueeze(1))

    def commit(self, row: int, tokens: list[int]) -> None:
        """Append `tokens` to a row."""
        end = self.lengths[row] + len(tokens)
        self.ids[row, self.lengths[row] : end] = torch.tensor(tokens, device=self.ids.device)
        self.lengths[row] = end

    def truncate(self, row: int, length: int) -> None:
        """Forget a row's tokens from `length` on."""
        self.lengths[row] = min(self.lengths[row], length)
