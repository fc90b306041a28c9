"""Acceptance that is replayed, not earned: what random weights need to stand in for a model.

Drafts of random weights are hardly ever accepted. Here a round accepts as many as a fixed pattern
says, whatever was drafted: the time of every pass is real, the text is not. Records made with it
say "replayed".
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance import AcceptanceRule
from pillarattn.theory import alpha_of

SEED = 20251201


class ReplayedRule(AcceptanceRule):
    """Draws greedily, and accepts each draft after accepted ones with one chance.

    Args:
        rate: accepted / drafted in the mean, 0..1.
        k: drafts a round; sets the chance.
        stamps: gets the host's time whenever the device has finished a verify pass.
    """

    def __init__(self, rate: float, k: int, stamps: list[float]) -> None:
        super().__init__(SEED)
        self._chance = alpha_of(rate * k, k) if k else 0.0
        self._noise = torch.Generator().manual_seed(SEED)
        self._stamps = stamps

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the argmax."""
        return logits.argmax(dim=-1), None

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept by the pattern; the next token is the argmax there."""
        best = logits.argmax(dim=-1)
        if logits.is_cuda:
            torch.cuda.synchronize()
        self._stamps.append(perf_counter())
        drawn = torch.rand(draft.tokens.shape, generator=self._noise) < self._chance
        accepted = drawn.long().cumprod(dim=1).sum(dim=1)
        next_tokens = best.gather(1, accepted.to(best.device).unsqueeze(1)).squeeze(1)
        return Verdict(accepted.tolist(), next_tokens)


class ReplayedGenerator(SelfSpeculativeGenerator):
    """A generator whose rounds accept by `ReplayedRule`, and that knows when each one ended.

    Attributes:
        stamps: seconds of the host's clock, one a verify pass; the prompt's judgement comes first.
    """

    def __init__(self, rate: float, **options: Any) -> None:
        super().__init__(**options)
        self.rate = rate
        self.stamps: list[float] = []

    def new_rule(self, *, do_sample: bool) -> AcceptanceRule:
        """Return the rule of one generation."""
        self.stamps.clear()
        return ReplayedRule(self.rate, self.config.k, self.stamps)
