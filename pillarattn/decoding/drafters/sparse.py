"""The method's drafter: the model itself, attending to few keys."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft
from pillarattn.decoding.drafters.base import DRAFTERS, Drafter, DraftRequest


@DRAFTERS.register("sparse")
class SparseDrafter(Drafter):
    """k forward passes of one row each over the round's selection, then rolled back."""

    def draft(self, request: DraftRequest) -> Draft:
        """Draft token by token, each step seeing the drafts before it."""
        target, history = request.target, request.history
        base = target.cache.lengths
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        current = history.last_tokens()
        for i in range(request.k):
            logits = target.forward(current, request.step)
            seen = [n + i for n in history.lengths]
            logits = request.process(history, seen, logits)[:, 0]
            drawn, q = request.rule.draw(logits, [n - history.prompt_length for n in seen])
            history.sketch(i, drawn)
            tokens.append(drawn)
            if q is not None:
                probs.append(q)
            current = drawn.unsqueeze(1)
        target.cache.roll_back(base)
        return Draft(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)
