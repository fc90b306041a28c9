"""Pooled selection: one budget for all layers and KV heads of a row, spent by one threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_at_least, check_selection_inputs
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.pooled_select import reference

register("pooled_select", "reference", reference.pooled_select)
register("pooled_select", "triton", "pillarattn.kernels.pooled_select.launch:pooled_select")


def pooled_select(
    scores: Tensor,
    *,
    layers: int,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    sink: int = 0,
    starts: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Keep the best positions of all layers and KV heads of a row together.

    Every head keeps its newest min(recent, budget) positions and then up to `sink` first ones, as
    `topk_select` does. What the even budgets of a row's layers and heads leave, together, goes to
    their largest scores, wherever they are; so scores must mean the same everywhere. Ties go to the
    lowest layer, head and position; NaN ranks last.

    Args:
        scores: `[R, Hkv, S]` fp16, bf16 or fp32; R is `layers` times the batch, layer-major. What
            lies at or past `lengths` is undefined.
        layers: layers that share the budget of a row of the batch.
        lengths: `[R]`, tokens in each row.
        budgets: `[R]`, the even share: positions for each KV head.
        recent: `[R]`, newest positions that are kept, counted inside the budget.
        sink: first positions that are kept, counted inside the budget after `recent`.
        starts: `[R]`, first position that a row may keep (a window's); None is 0.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        indices `[R, Hkv, max(counts)]` int32, ascending, 0 past the counts; and counts `[R, Hkv]`
        int32, whose sum over a row's layers and heads is that of the even budgets.

    Raises:
        ValueError: a shape, dtype, device, `layers`, `sink` or (on the CPU) value is wrong.
    """
    starts = torch.zeros_like(lengths) if starts is None else starts
    check_selection_inputs(
        scores, lengths=lengths, budgets=budgets, recent=recent, starts=starts, sink=sink
    )
    check_at_least("layers", layers, 1)
    if len(scores) % layers:
        raise ValueError(
            f"the {len(scores)} rows must be layers times the batch, got layers={layers}"
        )
    compute = choose("pooled_select", implementation, scores)
    found: tuple[Tensor, Tensor] = compute(
        scores, layers=layers, lengths=lengths, budgets=budgets, recent=recent, sink=sink,
        starts=starts,
    )  # fmt: skip
    return found
