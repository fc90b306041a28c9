"""Gumbel acceptance: sampling whose noise is fixed by seed, row and step."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict, on_device
from pillarattn.decoding.acceptance.base import ACCEPTANCE, AcceptanceRule, match
from pillarattn.kernels import gumbel_argmax


@ACCEPTANCE.register("gumbel")
class GumbelRule(AcceptanceRule):
    """Every token is argmax(logits + g) with Gumbel noise g keyed by (seed, row, step).

    Drafts and target use the same noise, so that the output is the very path that plain sampling
    with this noise takes (`k=0`), whatever was drafted; its law is softmax(logits). The noise is
    the same on every device.

    Args:
        seed: key of the noise; None draws one from torch's global generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        key = int(torch.randint(2**62, ()).item()) if seed is None else seed
        # Its lowest 64 bits, as a signed number.
        self._key = (key + 2**63) % 2**64 - 2**63

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the argmax of the perturbed logits; token 0 where they allow none."""
        return self._tokens(logits.unsqueeze(1), steps).squeeze(1).clamp_min_(0), None

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept drafts that are the target's perturbed argmax."""
        return match(draft, self._tokens(logits, steps))

    def _tokens(self, logits: Tensor, steps: list[int]) -> Tensor:
        """Return the perturbed argmax of logits `[B, n, V]` that start at `steps`, `[B, n]`."""
        batch, width = logits.shape[:2]
        keys = [[self._key, row, step + i] for row, step in enumerate(steps) for i in range(width)]
        return gumbel_argmax(logits.flatten(0, 1), on_device(keys, logits.device).view(-1, 3)).view(
            batch, width
        )
