"""The places of the largest integers of each row on a CPU, by partition around a threshold."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

# numpy partitions with vector instructions where the processor has them: a tenth of the time of
# `torch.topk` (README). It comes with transformers; without it the caller sorts.
AVAILABLE = find_spec("numpy") is not None


def largest(ranks: Tensor, counts: Tensor, limit: int) -> Tensor:
    """Return the ascending places of the `counts[r]` largest of each row, the lowest at ties.

    Args:
        ranks: `[R, H, S]` int32 on the CPU.
        counts: `[R]` int64, 0..S.
        limit: columns of the result, at least the largest count.

    Returns:
        `[R, H, limit]` int32, 0 past the counts.
    """
    rows, heads, size = ranks.shape
    indices = torch.zeros(rows * heads, limit, dtype=torch.int32, device=ranks.device)
    if not limit or not indices.numel():
        return indices.view(rows, heads, limit)
    wanted = counts.unsqueeze(1).expand(rows, heads).reshape(-1)
    lines = ranks.reshape(-1, size)
    thresholds = _thresholds(ranks, counts)
    taken = lines >= thresholds
    found = taken.sum(dim=-1)
    tied = (found != wanted).nonzero().squeeze(1)
    if len(tied):
        taken[tied] = _lowest_of_equals(lines[tied], thresholds[tied], wanted[tied])
    # Row-major, and so ascending in each row.
    places = (taken.view(-1).nonzero().squeeze(1) % size).to(torch.int32)
    if len(places) == indices.numel():
        return places.view(rows, heads, limit)
    used = torch.arange(limit, device=ranks.device) < wanted.unsqueeze(-1)
    return indices.masked_scatter_(used, places).view(rows, heads, limit)


def _thresholds(ranks: Tensor, counts: Tensor) -> Tensor:
    """Return the smallest integer that each row keeps, `[R * H, 1]`; any where it keeps none."""
    import numpy

    rows, heads, size = ranks.shape
    thresholds = torch.empty(rows, heads, dtype=ranks.dtype, device=ranks.device)
    host = counts.tolist()
    for count in set(host):
        if count == 0:
            thresholds[counts == 0] = torch.iinfo(ranks.dtype).max
            continue
        # Rows of one batch hold nearly the same number of tokens: few counts differ.
        here = None if host.count(count) == rows else counts == count
        part = ranks if here is None else ranks[here]
        ordered = numpy.partition(part.numpy(), size - count, axis=-1)
        found = torch.from_numpy(ordered[..., size - count])
        if here is None:
            return found.reshape(-1, 1)
        thresholds[here] = found
    return thresholds.view(-1, 1)


def _lowest_of_equals(lines: Tensor, thresholds: Tensor, wanted: Tensor) -> Tensor:
    """Return what rows keep whose threshold occurs more than once: its first occurrences."""
    above, equal = lines > thresholds, lines == thresholds
    left = wanted - above.sum(dim=-1)
    return above | (equal & (equal.cumsum(dim=-1) <= left.unsqueeze(-1)))
