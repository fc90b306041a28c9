"""Pooling of several layers in plain PyTorch: stacked, and pooled as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pillarattn.kernels.verify_attention.pooling import pool_rows


def pool_layers(
    layers: Sequence[Tensor],
    *,
    lengths: Sequence[Tensor],
    rows: Tensor,
    end: int,
    normalise: str,
) -> Tensor:
    """Compute `kernels.pool_layers`."""
    return pool_rows(
        torch.cat([scores[..., :end] for scores in layers]),
        lengths=torch.cat(list(lengths)),
        rows=rows.repeat(len(layers)),
        normalise=normalise,
    )
