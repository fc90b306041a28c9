"""How far counts are from a law, for the tests of noise."""

from __future__ import annotations

import torch
from torch import Tensor

# Bounds of `torch.randint` for keys that use all bits of a word.
KEY_RANGE = (-(2**63), 2**63 - 1)


def chi_square_z(counts: Tensor, law: Tensor | None = None) -> float:
    """Return the chi-square of counts in standard deviations; without a law, of even chances."""
    counts = counts.flatten().double()
    if law is None:
        law = torch.ones_like(counts) / counts.numel()
    expected = law.double() * counts.sum()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)
