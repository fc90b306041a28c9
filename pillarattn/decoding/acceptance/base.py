"""The contract of an acceptance rule, and the matching that rules without randomness share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict
from pillarattn.registry import Registry


class AcceptanceRule(ABC):
    """Draws draft tokens and judges them against the target, from processed logits.

    Both halves live in one object because a rule is lossless only if it knows the distribution that
    drafts were really drawn from. `steps` are indices of new tokens, 0 for the first after the
    prompt. Every token of the output comes out of `judge`; `draw` serves drafts, whose rows may
    have passed their end, and so it never fails.

    Args:
        seed: key of the sampling noise, for rules that have one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    @abstractmethod
    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Choose one token a row from `logits` `[B, V]`; return it and q `[B, V]`, if q matters."""

    def law(self, logits: Tensor) -> Tensor | None:
        """Return the distribution that a token is drawn from, `[..., V]`; None: no chance is left.

        Where logits allow no token, it is uniform.
        """
        return None

    @abstractmethod
    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Compare the draft with the target's `logits` `[B, k + 1, V]`, which start at `steps`.

        Where the logits after the accepted drafts allow no token, the next token is -1.
        """


ACCEPTANCE: Registry[AcceptanceRule] = Registry("acceptance rule")


def match(draft: Draft, target_tokens: Tensor) -> Verdict:
    """Accept drafts while they equal what the target chooses, `[B, k + 1]`."""
    if not draft.k:
        # A plain step: nothing to count, and nothing to wait for.
        return Verdict([0] * target_tokens.shape[0], target_tokens[:, 0])
    equal = (draft.tokens == target_tokens[:, : draft.k]).to(torch.int64)
    accepted = equal.cumprod(dim=1).sum(dim=1)
    if draft.lengths is not None:
        accepted = accepted.minimum(draft.lengths)
    next_tokens = target_tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return Verdict(accepted.tolist(), next_tokens)
