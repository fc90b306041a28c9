"""Launches of pooled selection: a guess, the search of the threshold, shares of ties, the lists."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two
from pillarattn.kernels.pooled_select.triton_kernel import (
    bin_kernel,
    count_kernel,
    guess_kernel,
    list_kernel,
    narrow_kernel,
    prepare_kernel,
    share_kernel,
)

BLOCK = 2048
SAMPLES = 8192
BINS = 4096
# A right guess takes two passes as a rule. A wrong one leaves up to 32 bits, three passes of 12.
PASSES = 4
# Programs that a large GPU runs at once; fewer heads than that are split.
WAVE = 132 * 5


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
    splits: int | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.pooled_select`; the width of the lists is the one thing read on the host.

    Args:
        block: scores of a step.
        splits: of a head's scores (None: by the number of heads).
        width: of the lists, where the caller knows a bound of the counts; nothing is read then.
        others: as `kernels.pooled_select`.
    """
    rows, heads, size = scores.shape
    batch, device = rows // layers, scores.device
    if not scores.numel():
        indices = torch.zeros(rows, heads, 0, dtype=torch.int32, device=device)
        return indices, torch.zeros(rows, heads, dtype=torch.int32, device=device)
    scores = scores.detach()
    scores = scores if scores.stride(2) == 1 else scores.contiguous()
    pairs, steps = rows * heads, -(-size // block)
    splits = min(splits or max(1, WAVE // pairs), steps)
    span = -(-steps // splits) * block
    grid, sizes = (pairs, splits), (*scores.stride()[:2], heads, batch, size, span)
    ranges = torch.empty(4, rows, dtype=torch.int32, device=device).unbind()
    contested = ranges[2:]
    bins = torch.empty(batch, BINS + 1, dtype=torch.int32, device=device)
    states = torch.empty(batch, 4, dtype=torch.int64, device=device)
    wanted, totals, rooms = torch.empty(3, batch, dtype=torch.int64, device=device).unbind()
    firm, ties, taken = torch.empty(3, pairs, splits, dtype=torch.int32, device=device).unbind()
    counts = torch.empty(rows, heads, dtype=torch.int32, device=device)
    parts = power_of_two(splits)
    tile = {"BLOCK": block, "LANES": 16 // scores.element_size()}
    with torch.cuda.device_of(scores):
        prepare_kernel[(batch,)](
            lengths.contiguous(), budgets.contiguous(), recent.contiguous(), starts.contiguous(),
            *ranges, wanted, totals, rooms, bins, layers, heads, batch, sink,
            LAYERS=64, BINS=BINS,
        )  # fmt: skip
        guess_kernel[(batch,)](
            scores, *contested, wanted, totals, states, *scores.stride()[:2],
            layers * heads, heads, batch, SAMPLES=SAMPLES, BINS=BINS, num_warps=16,
        )  # fmt: skip
        for _ in range(PASSES):
            bin_kernel[grid](scores, *contested, states, bins, *sizes, BINS=BINS, **tile)
            narrow_kernel[(batch,)](bins, states, wanted, rooms, BINS=BINS)
        count_kernel[grid](scores, *ranges, states, firm, ties, *sizes, **tile)
        share_kernel[(batch,)](
            firm, ties, rooms, taken, counts, layers * heads, heads, batch, splits,
            LINES=max(1, 1024 // parts), SPLITS=parts,
        )  # fmt: skip
        width = int(counts.max()) if width is None else width
        indices = torch.zeros(rows, heads, width, dtype=torch.int32, device=device)
        if width:
            list_kernel[grid](
                scores, *ranges, states, firm, taken, indices, *sizes, width,
                SPLITS=parts, **tile,
            )  # fmt: skip
    return indices, counts
