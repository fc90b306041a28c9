"""The ratio budget: a share of the context, with a floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RatioBudget:
    """N = min(length, max(min_budget, ceil(s * length))) keys per row and KV head.

    Source: arXiv 2512.01278; reference.md 1.2.
    """

    s: float
    min_budget: int

    def __call__(self, length: int) -> int:
        """Return the budget of a row of `length` tokens, forced ones counted."""
        # ceil of the decimal product: 0.05 * 3840 is 192.00000000000003 in binary.
        wanted = math.ceil(round(self.s * length, 9))
        return min(length, max(self.min_budget, wanted))

    def of(self, lengths: Tensor) -> Tensor:
        """Return the budgets of rows whose lengths, int64, the device alone knows."""
        product = lengths.double() * self.s
        # As above: rounded to nine decimals before it is rounded up.
        wanted = torch.ceil(torch.round(product * 1e9) / 1e9).long()
        return torch.minimum(lengths, wanted.clamp_min(self.min_budget))
