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
AT_ONCE = 1 << 17
# Tokens that may win, past which they are not kept for later. As a rule a row has one or two; where
# logits are so large that noise is lost beside them, it has all.
MANY = 1 << 14
# Tokens of which one maximum is taken first: that is quicker than to look for where it is.
BLOCK = 256
# A fp32 number is 2^e (1 + m), its bits are (e + 127 + m) 2^23, and log2(1 + m) is at least m.
LOG_BIT = LN2 * 2.0**-23
# Left out of a bound: a uniform number counts its word's last bits, an exponent is 127 too large.
OFFSET = (127 + WORD_BITS) * LN2
# More than fp32 arithmetic puts a bound wrong by: a part of it, and an amount beside that.
SLACK_SHARE = 2.0**-20
SLACK = 1e-4


def gumbel_argmax(
    logits: Tensor, keys: Tensor | tuple[Tensor | int, ...], temperature: float | None = None
) -> Tensor:
    """Compute `kernels.gumbel_argmax`."""
    rows, size = logits.shape
    if not logits.numel():
        return torch.full((rows,), -1, dtype=torch.int64, device=logits.device)
    words = row_words(joined(keys, logits))
    spread = torch.arange(size, dtype=torch.int32, device=logits.device) * SPREAD
    few = max(1, AT_ONCE // size)
    parts = []
    for first in range(0, rows, few):
        some = slice(first, first + few)
        block = scaled(logits[some], temperature)
        row, token = _contenders(block, words[some], spread)
        if len(token) > MANY:
            best = _best(block[row, token], words[some], row, token, size)
            row = (best >= 0).nonzero()[:, 0]
            token = best[row]
        parts.append(torch.stack([row + first, token]))
    row, token = torch.cat(parts, dim=1)
    return _best(scaled(logits[row, token], temperature), words, row, token, size)


def joined(keys: Tensor | tuple[Tensor | int, ...], logits: Tensor) -> Tensor:
    """Return keys as one tensor `[R, 3]`."""
    if isinstance(keys, Tensor):
        return keys
    blank = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return torch.stack([blank + part for part in keys], dim=1)


def scaled(logits: Tensor, temperature: float | None) -> Tensor:
    """Return what noise is added to: the logits, or fp32 (of fp64 fp64) quotients of them."""
    if temperature is None:
        return logits
    kind = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(kind) / temperature


def _best(chosen: Tensor, words: Tensor, row: Tensor, token: Tensor, size: int) -> Tensor:
    """Return the tokens with the largest sums of their rows, `[R]`; -1 for a row without any.

    Args:
        chosen: `[N]`, what noise is added to, of tokens `token` of rows `row`.
        words: `[R, 4]`, of all rows.
        row, token: `[N]` int64.
        size: tokens of a vocabulary.
    """
    reached = scores(chosen, token, words[row])
    best = torch.full((len(words),), -torch.inf, dtype=torch.float64, device=chosen.device)
    best.scatter_reduce_(0, row, reached, "amax")
    wins = reached == best[row]
    lowest = torch.full((len(words),), size, device=chosen.device)
    lowest.scatter_reduce_(0, row[wins], token[wins], "amin")
    return lowest.masked_fill(lowest == size, -1)


def _contenders(logits: Tensor, words: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and tokens that may win, some more among them; none of an impossible row."""
    bound = _bounds(logits, words, spread)
    blocks = bound.amax(dim=2)
    top, block = blocks.max(dim=1, keepdim=True)
    lead = bound[torch.arange(len(bound), device=bound.device), block[:, 0]].argmax(1, keepdim=True)
    lead += block * BLOCK
    # What the leader reaches at least, from its uniform number rounded up.
    word = token_words(spread[lead], words[:, 0, None], words[:, 1, None]).double()
    most = ((word + 1.0) * 2.0**-WORD_BITS).clamp_max(LARGEST_UNIFORM)
    sure = logits.gather(1, lead).double() - (-torch.log1p(-most)).log()
    needed = sure - OFFSET - SLACK - sure.abs() * SLACK_SHARE
    # Not below all numbers, which would ask for -inf too. NaN is reached by none.
    needed = needed.clamp_min(torch.finfo(bound.dtype).min)
    needed = torch.where(top.isfinite(), needed, torch.nan).to(bound.dtype)
    row, block = (blocks >= needed).nonzero(as_tuple=True)
    some, place = (bound[row, block] >= needed[row]).nonzero(as_tuple=True)
    return row[some], block[some] * BLOCK + place


def _bounds(logits: Tensor, words: Tensor, spread: Tensor) -> Tensor:
    """Return what no sum exceeds, less `OFFSET`, `[rows, blocks, BLOCK]`; -inf past the last token.

    An exponential variable E of a uniform u is at least u + u^2 / 2, and so
    logit - log(u + u^2 / 2), for u rounded down, is at least logit - log(E). So is what takes the
    place of the logarithm with less than it.
    """
    rows, size = logits.shape
    u = token_words(spread, words[:, 0, None], words[:, 1, None]).float()
    # In units of a word's last bit. A word of 0 is not below what the second word adds to it.
    rate = torch.mul(u, 2.0 ** -(WORD_BITS + 1)).add_(1.0).mul_(u).add_(2.0 ** -(WORD_BITS + 1))
    kind = torch.promote_types(logits.dtype, torch.float32)
    bound = torch.full((rows, -(-size // BLOCK), BLOCK), -torch.inf, dtype=kind, device=u.device)
    bits = u.copy_(rate.view(torch.int32))
    torch.sub(logits, bits, alpha=LOG_BIT, out=bound.view(rows, -1)[:, :size])
    return bound
