"""Rejection rules whose noise is a request's own, whoever else draws in between."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance import RejectionRule
from pillarattn.decoding.acceptance.block import block_verify
from pillarattn.kernels import rejection_sample


class OwnRejection(RejectionRule):
    """Token-wise rejection with a generator of its own.

    The noise is a sequence and not keyed by position: a token that is drawn again after a rejection
    must not meet noise that had a part in it. So the law is exact for every request by itself, and
    its tokens depend on how its rounds fell, which the batch decides; `k=0` has no rounds.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._generator: torch.Generator | None = None

    def noise(self, device: torch.device) -> torch.Generator:
        """Return the generator, made where the first logits are."""
        if self._generator is None:
            self._generator = torch.Generator(device)
            if self.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.seed)
        return self._generator

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Sample from `law(logits)` and return that distribution."""
        probs = self.law(logits)
        generator = self.noise(logits.device)
        return torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1), probs

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept d_i with probability min(1, p_i / q_i)."""
        accepted, next_tokens = rejection_sample(
            draft.tokens, logits.softmax(dim=-1), draft_probs=draft.probs,
            draft_lengths=draft.lengths, generator=self.noise(logits.device),
        )  # fmt: skip
        return Verdict(accepted.tolist(), next_tokens)


class OwnBlock(OwnRejection):
    """Block verification with a generator of its own; see `decoding.acceptance.block`."""

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept the longest part of the draft whose own test succeeds."""
        generator, device = self.noise(logits.device), logits.device
        uniforms = torch.rand(
            draft.tokens.shape, dtype=torch.float64, device=device, generator=generator
        )
        noise = torch.empty(
            len(draft.tokens), logits.shape[-1], dtype=torch.float64, device=device
        ).exponential_(generator=generator)
        accepted, next_tokens = block_verify(
            draft, logits.softmax(dim=-1), uniforms=uniforms, noise=noise
        )
        return Verdict(accepted.tolist(), next_tokens)
