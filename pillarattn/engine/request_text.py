"""A request's tokens, kept on the host: the device has them where somebody reads them there."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import on_device


class RequestText:
    """A prompt and what was decoded after it, with drafts written past its end ahead of time.

    It is the one row of a `History` to logits processors, which see drafts as history. Nothing is
    copied to the device before `ids` is asked for, and then only what has changed.

    Args:
        prompt: token ids.
        device: where `ids` lie.

    Attributes:
        lengths: `[tokens committed]`.
        prompt_length: tokens of the prompt.
    """

    def __init__(self, prompt: list[int], device: torch.device) -> None:
        self.device = device
        self.lengths, self.prompt_length = [len(prompt)], len(prompt)
        # Past the committed ones lie the drafts that were written last.
        self._tokens = list(prompt)
        self._ids: Tensor | None = None
        # Tokens at the beginning of `_ids` that are right.
        self._copied = 0

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.lengths[0]

    @property
    def newest(self) -> int:
        """The committed token that came last."""
        return self._tokens[self.length - 1]

    def tokens(self, start: int, end: int) -> list[int]:
        """Return committed tokens `start..end - 1`."""
        return self._tokens[start : min(end, self.length)]

    def sketch(self, offset: int, token: int) -> None:
        """Write a token `offset` past the end, at most one past what was written there."""
        self._write(self.length + offset, token)

    def commit(self, token: int) -> None:
        """Append a token."""
        self._write(self.lengths[0], token)
        self.lengths[0] += 1

    @property
    def ids(self) -> Tensor:
        """All tokens written so far, `[1, L]` int64 on the device; others may follow them."""
        end = len(self._tokens)
        if self._ids is None or self._ids.shape[1] < end:
            self._ids = torch.zeros(1, 2 * end, dtype=torch.int64, device=self.device)
            self._copied = 0
        if self._copied < end:
            self._ids[0, self._copied : end] = on_device(self._tokens[self._copied :], self.device)
            self._copied = end
        return self._ids

    def _write(self, place: int, token: int) -> None:
        if place < len(self._tokens):
            if self._tokens[place] == token:
                return
            del self._tokens[place:]
        self._tokens.append(token)
        self._copied = min(self._copied, place)
