"""Launches of the pooling of row scores: one for all layers that are laid out alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two, stretched
from pillarattn.kernels.pool_layers.triton_kernel import pool_kernel

# Scores that a program reads at once.
TILE = 4096
# Query rows of them, and layers of a launch: each is an argument of the kernel.
MOST_LINES = 8
MOST_LAYERS = 48


def pool_layers(
    layers: Sequence[Tensor],
    *,
    lengths: Sequence[Tensor],
    rows: Tensor,
    end: int,
    normalise: str,
) -> Tensor:
    """Compute `kernels.pool_layers`; reads nothing on the host."""
    batch, heads, queries, _ = layers[0].shape
    # Whatever the context's length, one compiled kernel takes it.
    width = stretched(end)
    pooled = torch.empty(
        len(layers) * batch, heads, width, dtype=torch.float32, device=layers[0].device
    )
    if not pooled.numel():
        return pooled[..., :end]
    alike = [scores if scores.stride(3) == 1 else scores.contiguous() for scores in layers]
    # The layers of a model share one tensor of lengths, as a rule.
    is_shared = all(length is lengths[0] for length in lengths)
    every = lengths[0].contiguous() if is_shared else torch.cat(list(lengths))
    first, lines = 0, min(power_of_two(queries), MOST_LINES)
    block = TILE // lines
    with torch.cuda.device_of(layers[0]):
        for part in _parts(alike):
            count = len(part)
            pool_kernel[(count * batch * heads, -(-width // block))](
                tuple(part),
                every if is_shared else every[first * batch :],
                rows.contiguous(),
                pooled[first * batch :],
                *part[0].stride()[:3],
                0 if is_shared else batch,
                batch, heads, queries, part[0].shape[3], width,
                VISIBLE=normalise == "visible", LINES=lines, BLOCK=block,
            )  # fmt: skip
            first += count
    return pooled[..., :end]


def _parts(layers: list[Tensor]) -> list[list[Tensor]]:
    """Return the layers in runs of one layout, as many as a launch takes."""
    parts: list[list[Tensor]] = []
    for _, run in groupby(layers, key=lambda t: (t.dtype, t.shape, t.stride())):
        same = list(run)
        parts += [same[i : i + MOST_LAYERS] for i in range(0, len(same), MOST_LAYERS)]
    return parts
