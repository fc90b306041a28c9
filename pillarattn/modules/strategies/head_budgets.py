"""How a row's keys are divided among its layers and KV heads: evenly, or where mass is."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.modules.strategies.request import SelectionRequest


def pooled_places(request: SelectionRequest, mass: Tensor) -> Tensor:
    """Spend a row's whole budget on the layers and KV heads of the request by one threshold.

    Every head keeps its forced tokens; what is left goes to the largest masses of all layers and
    heads. Only masses that mean the same everywhere can be compared like that: a forecast in units
    of attention does, a rank does not.

    Args:
        request: R = layers times batch rows, layer-major.
        mass: `[R, Hkv, S]`, what each key is expected to be attended to; larger is better. Ties go
            to the lowest layer, head, position; NaN ranks last.

    Returns:
        `[R, Hkv, S]` bool, the positions to keep; over a row's layers and heads as many as the even
        budgets together.
    """
    layers, heads, size = len(request.layers), request.kv_heads, request.max_length
    visible, open_places = request.visible(), request.contested()
    forced = visible & ~open_places
    room = visible.sum(dim=-1)
    kept = torch.minimum(request.budgets, room)
    # What is left to the ranking, by row of the batch: all its layers and heads together.
    left = ((kept - forced.sum(dim=-1)) * heads).view(layers, -1).sum(dim=0)
    values = mass.float().nan_to_num(nan=-1.0)
    values = values.masked_fill(~open_places.unsqueeze(1), -2.0)
    by_row = values.view(layers, -1, heads, size).transpose(0, 1).flatten(1)
    chosen = torch.stack([_best(row, n) for row, n in zip(by_row, left.tolist(), strict=True)])
    chosen = chosen.view(-1, layers, heads, size).transpose(0, 1).reshape(-1, heads, size)
    return chosen | forced.unsqueeze(1)


def listed(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return a selection's indices `[R, Hkv, N]` int32, ascending, and counts `[R, Hkv]` int32."""
    rows, heads, size = places.shape
    flat = places.reshape(rows * heads, size)
    counts = flat.sum(dim=-1, dtype=torch.int32)
    row, position = flat.nonzero(as_tuple=True)
    slot = flat.cumsum(dim=-1)[row, position] - 1
    width = int(counts.max()) if counts.numel() else 0
    indices = torch.zeros(rows * heads, width, dtype=torch.int32, device=places.device)
    indices[row, slot] = position.to(torch.int32)
    return indices.view(rows, heads, width), counts.view(rows, heads)


def _best(values: Tensor, count: int) -> Tensor:
    """Return which of `values` `[n]` are its `count` largest ones, first come first at a tie."""
    if count <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    least = values.topk(min(count, len(values)), sorted=False).values.min()
    above, level = values > least, values == least
    return above | (level & (level.cumsum(0) <= count - above.sum()))
