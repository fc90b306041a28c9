"""Pooling of row scores: one score a key, out of the query rows that count."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_integers, check_one_device, check_shape, check_values

NORMALISATIONS = ("rows", "visible")


def check_normalise(normalise: str) -> None:
    """Raise `ValueError` unless there is such a divisor."""
    if normalise not in NORMALISATIONS:
        raise ValueError(
            f"normalise must be one of {', '.join(map(repr, NORMALISATIONS))}, got {normalise!r}"
        )


def pool_rows(
    row_scores: Tensor, *, lengths: Tensor, rows: Tensor, normalise: str = "rows"
) -> Tensor:
    """Sum the scores of the leading `rows` query rows and divide by how many there are.

    Args:
        row_scores: `[B, Hkv, Q, S]`, as `verify_attention` returns them.
        lengths: `[B]`, tokens in each row, the Q new ones included.
        rows: `[B]`, query rows that count, 1..Q (the accepted ones).
        normalise: "rows" divides by `rows`; "visible" divides position j by min(Q, length - j),
            the rows that could see it, as the paper's code does (reference.md 1.3).

    Returns:
        `[B, Hkv, S]` fp32, 0 at positions >= length.

    Raises:
        ValueError: a shape, dtype, device, `normalise` or (on the CPU) number of rows is wrong.
    """
    check_normalise(normalise)
    check_shape("row_scores", row_scores, (None,) * 4, "[B, Hkv, Q, S]")
    batch, _, queries, size = row_scores.shape
    check_integers("lengths", lengths, (batch,), "[B]")
    check_integers("rows", rows, (batch,), "[B]")
    check_one_device(row_scores=row_scores, lengths=lengths, rows=rows)
    check_values("rows", rows, minimum=1, maximum=queries)
    counted = torch.arange(queries, device=rows.device) < rows.unsqueeze(-1)
    counted_scores = row_scores.float().masked_fill(~counted[:, None, :, None], 0.0)
    pooled = counted_scores.sum(dim=2)
    remaining = lengths.unsqueeze(-1) - torch.arange(size, device=lengths.device)
    if normalise == "rows":
        divisor = rows.view(-1, 1, 1)
    else:
        divisor = remaining.clamp(min=1, max=max(queries, 1)).unsqueeze(1)
    return (pooled / divisor).masked_fill((remaining <= 0).unsqueeze(1), 0.0)
