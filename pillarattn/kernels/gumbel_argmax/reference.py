"""Gumbel argmax in plain PyTorch: a cheap bound of every token's sum, the exact sum of a few."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.gumbel_argmax.noise import (
    LARGEST_UNIFORM,
    LN2,
    SPREAD,
    WORD_BITS,
    row_words,
    scores,
    token_words,
)

# Logits that are worked on at once, so that they stay in a core's cache.
AT_ONCE = 1 << 16
# More than fp32 arithmetic puts a bound wrong by: a part of it, and an amount beside that.
SLACK_SHARE = 2.0**-20
SLACK = 1e-4


def gumbel_argmax(logits: Tensor, keys: Tensor) -> Tensor:
    """Compute `kernels.gumbel_argmax`."""
    rows, size = logits.shape
    if not logits.numel():
        return torch.full((rows,), -1, dtype=torch.int64, device=logits.device)
    words = row_words(keys)
    spread = torch.arange(size, dtype=torch.int32, device=logits.device) * SPREAD
    few = max(1, AT_ONCE // size)
    parts = []
    for first in range(0, rows, few):
        some = slice(first, first + few)
        row, token = _contenders(logits[some], words[some], spread)
        parts.append(torch.stack([row + first, token]))
    row, token = torch.cat(parts, dim=1)
    reached = scores(logits[row, token], token, words[row])
    best = torch.full((rows,), -torch.inf, dtype=torch.float64, device=logits.device)
    best.scatter_reduce_(0, row, reached, "amax")
    wins = reached == best[row]
    lowest = torch.full((rows,), size, device=logits.device)
    lowest.scatter_reduce_(0, row[wins], token[wins], "amin")
    return lowest.masked_fill(lowest == size, -1)


def _contenders(logits: Tensor, words: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and tokens that may win, some more among them; none of an impossible row.

    An exponential variable E of a uniform u is at least u + u^2 / 2, and so
    logit - log(u + u^2 / 2), for u rounded down, is at least logit - log(E).
    """
    first, second = words[:, 0, None], words[:, 1, None]
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    u = token_words(spread, first, second).to(kind)
    # In units of a word's last bit. A word of 0 is not below what the second word adds to it.
    rate = torch.mul(u, 2.0 ** -(WORD_BITS + 1)).add_(1.0).mul_(u).add_(2.0 ** -(WORD_BITS + 1))
    bound = torch.sub(logits, rate.log_(), out=rate)
    top, lead = bound.max(dim=1, keepdim=True)
    # What the leader reaches at least, from u rounded up.
    word = token_words(spread[lead], first, second).double()
    most = ((word + 1.0) * 2.0**-WORD_BITS).clamp_max(LARGEST_UNIFORM)
    sure = logits.gather(1, lead).double() - (-torch.log1p(-most)).log()
    needed = sure - WORD_BITS * LN2 - SLACK - sure.abs() * SLACK_SHARE
    # NaN is reached by none.
    needed = torch.where(top.isfinite(), needed, torch.nan).to(kind)
    row, token = (bound >= needed).nonzero(as_tuple=True)
    return row, token
