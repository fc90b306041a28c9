"""Top-K selection: the positions that a budget keeps, out of one score per key."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_at_least, check_selection_inputs
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.topk_select import reference

register("topk_select", "reference", reference.topk_select)
register("topk_select", "triton", "pillarattn.kernels.topk_select.triton_kernel:topk_select")


def topk_select(
    scores: Tensor,
    *,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    sink: int = 0,
    starts: Tensor | None = None,
    capacity: int | None = None,
    most: int = 0,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Keep positions of each row and KV head: the newest, the first, and the Top-K of the others.

    A row may keep positions `starts` up to `lengths - 1`. With a budget of at least that many, it
    keeps all. Else the newest min(recent, budget) are kept, then up to `sink` first ones, and the
    best scores fill what the budget leaves. Ties go to the lowest position; NaN ranks last.

    Args:
        scores: `[R, Hkv, S]` fp16, bf16 or fp32; R is any rows (batch, or layers times batch). What
            lies at or past `lengths` is undefined.
        lengths: `[R]`, tokens in each row.
        budgets: `[R]`, positions to keep per KV head.
        recent: `[R]`, newest positions that are kept, counted inside the budget.
        sink: first positions that are kept, counted inside the budget after `recent`.
        starts: `[R]`, first position that a row may keep (a window's); None is 0.
        capacity: width of the result, which then needs no host read of the counts (a CUDA graph
            cannot hold one); budgets above it are cut to it. None: the largest count.
        most: positions that other calls keep at most: one compiled kernel serves them all. It does
            not change the result.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        indices `[R, Hkv, max(counts)]` (or `capacity`) int32, ascending, 0 past the counts; and
        counts `[R, Hkv]` int32.

    Raises:
        ValueError: a shape, dtype, device, `sink` or (on the CPU) length is wrong.

    Source: arXiv 2512.01278; reference.md 1.2 and 1.5.
    """
    starts = torch.zeros_like(lengths) if starts is None else starts
    check_selection_inputs(
        scores, lengths=lengths, budgets=budgets, recent=recent, starts=starts, sink=sink
    )
    check_at_least("capacity", capacity, 0)
    check_at_least("most", most, 0)
    compute = choose("topk_select", implementation, scores)
    selection: tuple[Tensor, Tensor] = compute(
        scores,
        lengths=lengths,
        budgets=budgets,
        recent=recent,
        sink=sink,
        starts=starts,
        capacity=capacity,
        most=most,
    )
    return selection
