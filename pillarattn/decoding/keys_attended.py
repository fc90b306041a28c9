"""How many keys the draft passes of a round attended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Selection
from pillarattn.modules.cache import ContiguousCache


def keys_attended(
    cache: ContiguousCache,
    bases: list[int],
    selections: dict[int, Selection],
    passes: list[list[int]],
) -> list[tuple[float, float]]:
    """Return, by row, the keys that draft passes attended and that full attention would.

    Both are means over layers and KV heads, summed over passes. Of a pass of several rows it is the
    last one that counts, since keys are read once for all of them.

    Args:
        cache: whose layers say how far they look back.
        bases: tokens of each row where the round began.
        selections: the keys that drafts read, by layer; the other layers read all they see.
        passes: see `Draft.passes`.
    """
    if not passes:
        return [(0.0, 0.0)] * len(bases)
    layers = [i for i, layer in enumerate(cache.layers) if layer.lengths is not None]
    never = float("inf")
    # The default device may be a GPU, where each of these few numbers would be a launch.
    on_host: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    windows = torch.tensor(
        [never if (w := cache.layers[i].window) is None else w for i in layers], **on_host
    )
    kept = torch.full((len(layers), len(bases)), never, **on_host)
    if selections:
        places = {layer: place for place, layer in enumerate(layers)}
        rows = torch.tensor([places[layer] for layer in selections], device="cpu")
        # One transfer from the device for all layers.
        kept[rows] = _mean_counts(list(selections.values())).cpu().double()
    base = torch.tensor(bases, **on_host)
    length = base + torch.tensor(passes, **on_host)
    # By layer, pass and row.
    visible = length.minimum(windows.view(-1, 1, 1))
    read = (kept.unsqueeze(1) + length - base).minimum(visible)
    sums = [part.mean(dim=0).sum(dim=0).tolist() for part in (read, visible)]
    return list(zip(*sums, strict=True))


def _mean_counts(selections: list[Selection]) -> Tensor:
    """Return the mean over KV heads of each selection's counts, `[len(selections), B]`."""
    counts = [s.counts for s in selections]
    if len({c.shape for c in counts}) == 1:
        return torch.cat(counts).float().mean(dim=1).view(len(counts), -1)
    return torch.stack([c.float().mean(dim=1) for c in counts])
