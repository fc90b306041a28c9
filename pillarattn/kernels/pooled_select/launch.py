"""Launches of pooled selection: four digits of the threshold, the shares of ties, the lists."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.pooled_select.shares import shares_of
from pillarattn.kernels.pooled_select.triton_kernel import (
    count_kernel,
    histogram_kernel,
    list_kernel,
    narrow_kernel,
)

BLOCK = 2048


def pooled_select(
    scores: Tensor,
    *,
    layers: int,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    sink: int,
    starts: Tensor,
    block: int = BLOCK,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.pooled_select`; the width of the lists is the one thing read on the host.

    Args:
        block: scores of a step.
        width: of the lists, where the caller knows a bound of the counts; nothing is read then.
        others: as `kernels.pooled_select`.
    """
    rows, heads, size = scores.shape
    batch, device = rows // layers, scores.device
    if not scores.numel():
        indices = torch.zeros(rows, heads, 0, dtype=torch.int32, device=device)
        return indices, torch.zeros(rows, heads, dtype=torch.int32, device=device)
    shares = shares_of(lengths=lengths, budgets=budgets, recent=recent, sink=sink, starts=starts)
    scores = scores.detach()
    scores = scores if scores.stride(2) == 1 else scores.contiguous()
    strides, pairs = scores.stride()[:2], rows * heads
    wanted = (shares.left * heads).view(layers, batch).sum(dim=0)
    has_room = wanted > 0
    bins = torch.zeros(batch, 256, dtype=torch.int32, device=device)
    prefixes = torch.zeros(batch, dtype=torch.int64, device=device)
    with torch.cuda.device_of(scores):
        for shift in (24, 16, 8, 0):
            histogram_kernel[(pairs, -(-size // block))](
                scores, shares.lows, shares.highs, prefixes, bins, *strides, heads, batch,
                SHIFT=shift, BLOCK=block,
            )  # fmt: skip
            narrow_kernel[(batch,)](bins, prefixes, wanted)
        # Nothing left to choose: no key is that large.
        thresholds = prefixes.where(has_room, 2**32)
        above, ties = (torch.empty(rows, heads, dtype=torch.int32, device=device) for _ in "ab")
        count_kernel[(pairs,)](
            scores, shares.lows, shares.highs, thresholds, above, ties, *strides, heads, batch,
            BLOCK=block,
        )  # fmt: skip
        by_row = ties.view(layers, batch, heads).transpose(0, 1).flatten(1)
        earlier = by_row.cumsum(dim=1) - by_row
        taken = torch.minimum(by_row, (wanted.unsqueeze(-1) - earlier).clamp_min(0))
        taken = taken.view(batch, layers, heads).transpose(0, 1).reshape(rows, heads)
        forced = (shares.ends - shares.begins) - (shares.highs - shares.lows)
        counts = (forced.unsqueeze(-1) + above + taken).to(torch.int32)
        width = int(counts.max()) if width is None else width
        indices = torch.zeros(rows, heads, width, dtype=torch.int32, device=device)
        if width:
            list_kernel[(pairs,)](
                scores, shares.begins, shares.ends, shares.lows, shares.highs, thresholds,
                taken.to(torch.int32), indices, *strides, heads, batch, width, BLOCK=block,
            )  # fmt: skip
    return indices, counts
