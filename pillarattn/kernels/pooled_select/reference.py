"""Pooled selection in plain PyTorch: one Top-K for each row of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.pooled_select.shares import shares_of


def pooled_select(
    scores: Tensor,
    *,
    layers: int,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    sink: int,
    starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.pooled_select`; reads what each row may choose on the host."""
    rows, heads, size = scores.shape
    shares = shares_of(lengths=lengths, budgets=budgets, recent=recent, sink=sink, starts=starts)
    line = torch.arange(size, device=scores.device)
    visible = (line >= shares.begins.unsqueeze(-1)) & (line < shares.ends.unsqueeze(-1))
    contested = (line >= shares.lows.unsqueeze(-1)) & (line < shares.highs.unsqueeze(-1))
    # -inf is a score too: NaN and what may not be chosen rank below it.
    ranks = _ordered(scores).masked_fill(~contested.unsqueeze(1), torch.iinfo(torch.int32).min)
    by_row = ranks.view(layers, -1, heads, size).transpose(0, 1).flatten(1)
    wanted = (shares.left * heads).view(layers, -1).sum(dim=0).tolist()
    chosen = torch.zeros_like(by_row, dtype=torch.bool)
    for row, count in enumerate(wanted):
        chosen[row] = _best(by_row[row], count)
    chosen = chosen.view(-1, layers, heads, size).transpose(0, 1).reshape(rows, heads, size)
    return _listed(chosen | (visible & ~contested).unsqueeze(1))


def _ordered(scores: Tensor) -> Tensor:
    """Return int32 in the order of the scores, NaN below all."""
    floats = scores.detach().float() + 0.0
    bits = floats.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & torch.iinfo(torch.int32).max)
    return ordered.masked_fill_(floats.isnan(), torch.iinfo(torch.int32).min + 1)


def _best(ranks: Tensor, count: int) -> Tensor:
    """Return which of `ranks` `[n]` are its `count` largest ones, first come first at a tie."""
    if count <= 0:
        return torch.zeros_like(ranks, dtype=torch.bool)
    least = ranks.topk(min(count, len(ranks)), sorted=False).values.min()
    above, level = ranks > least, ranks == least
    return above | (level & (level.cumsum(0) <= count - above.sum()))


def _listed(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of True `[R, Hkv, N]` int32, ascending, and their counts."""
    rows, heads, size = places.shape
    flat = places.reshape(rows * heads, size)
    counts = flat.sum(dim=-1, dtype=torch.int32)
    row, position = flat.nonzero(as_tuple=True)
    slot = flat.cumsum(dim=-1)[row, position] - 1
    width = int(counts.max()) if counts.numel() else 0
    indices = torch.zeros(rows * heads, width, dtype=torch.int32, device=places.device)
    indices[row, slot] = position.to(torch.int32)
    return indices.view(rows, heads, width), counts.view(rows, heads)
