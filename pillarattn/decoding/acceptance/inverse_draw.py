"""Drawing tokens by inverting the distribution function: one uniform number a row."""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens that are summed before the search looks at single ones.
BLOCK = 256


def inverse_draw(probs: Tensor) -> Tensor:
    """Draw one index a row from `probs` `[B, V]`, which need not sum to 1; return `[B]` int64.

    `torch.multinomial` draws a random number for each of the V tokens, which on a CPU takes longer
    than a small model's layers; here it is one a row, in fp64, from torch's global generator. An
    index without mass is never drawn. Rows without mass give some index.
    """
    batch, size = probs.shape
    padded = -size % BLOCK
    blocks = torch.nn.functional.pad(probs, (0, padded)).view(batch, -1, BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    uniform = torch.rand(batch, 1, dtype=torch.float64, device=probs.device)
    # Not `uniform * total < total` but the first end past it: a block without mass has none.
    point = uniform * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp_max(ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double()
    within = inside.cumsum(dim=-1)
    # The two sums of a block may differ in the last bit: what is left stays below its own sum.
    left = (point - before).minimum(torch.nextafter(within[:, -1:], torch.zeros_like(point)))
    place = torch.searchsorted(within, left, right=True)
    return (block * BLOCK + place).squeeze(1).clamp_max(size - 1)
