"""Rejection sampling: the output follows the target's law exactly (reference.md section 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance.base import ACCEPTANCE, AcceptanceRule
from pillarattn.decoding.acceptance.inverse_draw import inverse_draw
from pillarattn.kernels import rejection_sample


@ACCEPTANCE.register("rejection")
class RejectionRule(AcceptanceRule):
    """Keeps each draft's true distribution q and resamples rejections from the residual.

    Noise comes from torch's global generator, as in plain sampling.
    """

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Sample from `law(logits)` and return that distribution."""
        probs = self.law(logits)
        if probs.is_cuda:
            return torch.multinomial(probs, num_samples=1).squeeze(1), probs
        return inverse_draw(probs), probs

    def law(self, logits: Tensor) -> Tensor:
        """Return softmax(logits)."""
        return logits.softmax(dim=-1).nan_to_num(nan=1.0 / logits.shape[-1])

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept d_i with probability min(1, p_i / q_i)."""
        accepted, next_tokens = rejection_sample(
            draft.tokens,
            logits.softmax(dim=-1),
            draft_probs=draft.probs,
            draft_lengths=draft.lengths,
        )
        # Of a plain step there is nothing to count, and nothing to wait for.
        return Verdict(accepted.tolist() if draft.k else [0] * len(logits), next_tokens)
