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
from pillarattn.config import AUTO
from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance import AcceptanceRule
from pillarattn.decoding.acceptance.base import match
from pillarattn.theory import alpha_of

SEED = 20251201


class ReplayedRule(AcceptanceRule):
    """Draws greedily, and accepts each draft after accepted ones with one chance.

    Args:
        chance: of each draft, 0..1, however many a round has.
        stamps: gets the host's time whenever the device has finished a verify pass, or has been
            given one of a plain step.
    """

    def __init__(self, chance: float, stamps: list[float]) -> None:
        super().__init__(SEED)
        self._chance = chance
        self._noise = torch.Generator().manual_seed(SEED)
        self._stamps = stamps

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the argmax."""
        return logits.argmax(dim=-1), None

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept by the pattern; the next token is the argmax there."""
        best = logits.argmax(dim=-1)
        is_plain = bool(self._stamps) and not draft.k
        if logits.is_cuda and not is_plain:
            torch.cuda.synchronize()
        self._stamps.append(perf_counter())
        if not draft.k:
            # A plain step costs what one of greedy decoding does, which waits once, later on.
            return match(draft, best)
        drawn = torch.rand(draft.tokens.shape, generator=self._noise) < self._chance
        accepted = drawn.long().cumprod(dim=1).sum(dim=1)
        next_tokens = best.gather(1, accepted.to(best.device).unsqueeze(1)).squeeze(1)
        return Verdict(accepted.tolist(), next_tokens)


class ReplayedGenerator(SelfSpeculativeGenerator):
    """A generator whose rounds accept by `ReplayedRule`, and that knows when each one ended.

    Attributes:
        chance: of each draft after accepted ones.
        stamps: seconds of the host's clock, one a verify pass; the prompt's judgement comes first.

    Args:
        rate: accepted / drafted in the mean, 0..1, of rounds of `rate_k` drafts.
        rate_k: None is the generator's own k; with k="auto" a number. Rounds of another k then have
            the same chance a draft.
        options: of `SelfSpeculativeGenerator`.

    Raises:
        ValueError: k="auto" and no `rate_k`.
    """

    def __init__(self, rate: float, *, rate_k: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if rate_k is None:
            if self.config.k == AUTO:
                raise ValueError("k='auto' has rounds of many k; say which has the rate: rate_k=")
            rate_k = int(self.config.k)
        self.chance = alpha_of(rate * rate_k, rate_k) if rate_k else 0.0
        self.stamps: list[float] = []

    def new_rule(self, *, do_sample: bool) -> AcceptanceRule:
        """Return the rule of one generation."""
        self.stamps.clear()
        return ReplayedRule(self.chance, self.stamps)
