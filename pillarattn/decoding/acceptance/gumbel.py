"""Gumbel acceptance: sampling whose noise is fixed by seed, row and step."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance.base import ACCEPTANCE, AcceptanceRule, match


@ACCEPTANCE.register("gumbel")
class GumbelRule(AcceptanceRule):
    """Every token is argmax(logits + g) with Gumbel noise g keyed by (seed, row, step).

    Drafts and target use the same noise, so that the output is the very path that plain sampling
    with this noise takes (`k=0`), whatever was drafted; its law is softmax(logits).

    Args:
        seed: key of the noise; None draws one from torch's global generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self._key = int(torch.randint(2**62, ()).item()) if seed is None else seed

    def draw(self, logits: Tensor, steps: list[int]) -> tuple[Tensor, Tensor | None]:
        """Return the argmax of the perturbed logits."""
        return (logits + self._noise(logits, steps)).argmax(dim=-1), None

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept drafts that are the target's perturbed argmax."""
        columns = [
            self.draw(logits[:, i], [step + i for step in steps])[0] for i in range(draft.k + 1)
        ]
        # NaN makes the largest logit NaN, and no token at all makes it -inf.
        possible = logits.amax(dim=-1).isfinite()
        return match(draft, torch.stack(columns, dim=1).masked_fill(~possible, -1))

    def _noise(self, logits: Tensor, steps: list[int]) -> Tensor:
        uniform = torch.empty(2, logits.shape[-1], dtype=torch.float64, device=logits.device)
        noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        generator = torch.Generator(device=logits.device)
        for row, step in enumerate(steps):
            key = _mixed(self._key, row, step)
            # A CPU generator keeps 32 bits of its seed, and two positions would soon share one.
            # The sum of two uniform variables modulo 1 is uniform and depends on both halves.
            for half, seed in enumerate((key & 0xFFFFFFFF, key >> 32)):
                generator.manual_seed(seed)
                uniform[half].uniform_(generator=generator)
            noise[row] = uniform.sum(dim=0).remainder(1.0)
        tiny = torch.finfo(torch.float64).tiny
        return -(-noise.clamp_min(tiny).log()).clamp_min(tiny).log()


def _mixed(*parts: int) -> int:
    """Return a 64-bit key of the parts; neighbours share nothing (splitmix64's finaliser)."""
    key = 0
    for part in parts:
        key = (key + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key
