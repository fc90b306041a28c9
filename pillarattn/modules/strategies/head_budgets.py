"""How a row's keys are divided among its layers and KV heads: evenly, or where mass is."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.modules.strategies.request import SelectionRequest


def pooled_budgets(request: SelectionRequest, mass: Tensor) -> Tensor:
    """Divide a row's whole budget among the layers and KV heads of the request by one threshold.

    Every head keeps its forced tokens; what is left goes to the largest masses of all layers and
    heads. Only masses that mean the same everywhere can be compared like that: a forecast in units
    of attention does, a rank does not.

    Args:
        request: R = layers times batch rows, layer-major.
        mass: `[R, Hkv, S]`, what each key is expected to be attended to; larger is better. Ties go
            to the lowest layer, head, position; NaN ranks last.

    Returns:
        `[R, Hkv]` int64; its sum over a row's layers and heads is that of the even budgets.
    """
    layers, heads, size = len(request.layers), request.kv_heads, request.max_length
    room = (request.lengths - request.starts).clamp_min(0)
    kept = torch.minimum(request.budgets, room)
    open_places = request.contested()
    newest = torch.minimum(request.recent, kept)
    forced = newest + (kept - newest).clamp(0, request.sink)
    # What is left to the ranking, by row of the batch: all layers and heads together.
    left = ((kept - forced) * heads).view(layers, -1).sum(dim=0)
    values = mass.float().nan_to_num(nan=-1.0)
    values = values.masked_fill(~open_places.unsqueeze(1), -2.0)
    by_row = values.view(layers, -1, heads, size).transpose(0, 1).flatten(1)
    chosen = torch.stack([_best(row, n) for row, n in zip(by_row, left.tolist(), strict=True)])
    counts = chosen.view(-1, layers, heads, size).sum(dim=-1)
    return counts.transpose(0, 1).reshape(-1, heads) + forced.unsqueeze(-1)


def _best(values: Tensor, count: int) -> Tensor:
    """Return which of `values` `[n]` are its `count` largest ones, first come first at a tie."""
    if count <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    least = values.topk(min(count, len(values)), sorted=False).values.min()
    above, level = values > least, values == least
    return above | (level & (level.cumsum(0) <= count - above.sum()))
