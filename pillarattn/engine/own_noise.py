"""Rejection rules whose noise is a request's own, whoever else draws in between."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict, on_device
from pillarattn.decoding.acceptance import RejectionRule
from pillarattn.decoding.acceptance.block import block_verify
from pillarattn.kernels import gumbel_argmax, keyed_rejection
from pillarattn.kernels.keyed_rejection import DRAFT


class OwnRejection(RejectionRule):
    """Token-wise rejection of one request, with noise keyed by seed, purpose and number.

    A token that is drawn again after a rejection must not meet noise that had a part in it. So the
    noise is not keyed by position: a verdict has the number of verdicts that were looked at before
    it, the first token's among them, and a draft that of the coming verdict, and its place in the
    round. A draft that is forgotten is drawn anew with the same noise: nobody has judged it, and
    what it was may have decided that it was forgotten (a round that "confidence" draws out waits
    longer for room), so that one of other noise would favour those that are not. Likewise what ran
    and was never looked at (a step that raised). A sample of a shared prompt has a seed of its own,
    a request that is resumed goes on. Given what came before it, the noise of each round is thus
    fresh, and the law exact.

    The host knows the numbers ahead, so that draws of many requests can be made at once and before
    the ones before are looked at (`batched_rejection.py`); the tokens are those that the request
    draws by itself. They depend on how its rounds fell, which the batch decides; `k=0` has none.

    Attributes:
        key: the seed, a signed number of 64 bits.
        drafts: those of the round that have been looked at.
        verdicts: how many have been looked at.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.key = signed(torch.Generator().seed() if seed is None else seed)
        self.drafts = self.verdicts = 0

    def draft_number(self, ahead: int = 0) -> int:
        """Return the number of the round's next draft, or of one `ahead` of it."""
        return (self.verdicts << 32) + self.drafts + ahead

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Sample from softmax(logits) `[1, V]` and return that distribution.

        Where no token is possible it is NaN, and the draft never stands.
        """
        key = on_device([[self.key, DRAFT, self.draft_number()]], logits.device)
        token = gumbel_argmax(logits, key)
        self.drafts += 1
        return token.clamp_min_(0), logits.softmax(dim=-1)

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept d_i with probability min(1, p_i / q_i), of one request."""
        device, k = logits.device, draft.k
        verdict = keyed_rejection(
            logits[0].softmax(dim=-1),
            on_device([[0, k + 1, self.key, self.verdicts]], device),
            places=torch.arange(k + 1, device=device),
            drafted=draft.tokens[0],
            laws=None if draft.probs is None else draft.probs[0],
            longest=k,
        )
        self.verdicts, self.drafts = self.verdicts + 1, 0
        return Verdict(verdict[1].tolist(), verdict[0])


class OwnBlock(RejectionRule):
    """Block verification with a generator of its own; see `decoding.acceptance.block`.

    The noise is a sequence, for the reason that `OwnRejection` gives.
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


def signed(seed: int) -> int:
    """Return the integer of 64 bits with the same low bits."""
    return (seed + 2**63) % 2**64 - 2**63
