"""Draws the tokens of a draft one position after the other, and keeps what they were drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft
from pillarattn.decoding.drafters.base import DraftRequest


class DrawnTokens:
    """A draft that grows by one column for each `add`; rows may end before the others.

    Attributes:
        newest: `[B, 1]`, the column drawn last.
    """

    def __init__(self, request: DraftRequest) -> None:
        self.newest: Tensor = request.history.last_tokens()
        self._request = request
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._lengths: Tensor | None = None
        self._goes_on: Tensor | None = None

    def add(self, logits: Tensor) -> bool:
        """Draw a column from processed `logits` `[B, V]`; return whether any row drafts on."""
        request, history = self._request, self._request.history
        at = len(self._tokens)
        steps = [n + at - history.prompt_length for n in history.lengths]
        drawn, q = request.rule.draw(logits, steps)
        history.sketch(at, drawn)
        self._tokens.append(drawn)
        if q is not None:
            self._probs.append(q)
        self.newest = drawn.unsqueeze(1)
        sure = request.length.goes_on(logits)
        if sure is None:
            return True
        if self._lengths is None or self._goes_on is None:
            self._lengths, self._goes_on = torch.ones_like(drawn), sure
        else:
            self._lengths = self._lengths + self._goes_on
            self._goes_on = self._goes_on & sure
        return bool(self._goes_on[request.running].any())

    def finish(self, passes: list[list[int]] | None = None) -> Draft:
        """Return the draft; `passes` are those of the target."""
        return Draft(
            torch.stack(self._tokens, dim=1),
            torch.stack(self._probs, dim=1) if self._probs else None,
            lengths=self._lengths,
            passes=passes or [],
        )
