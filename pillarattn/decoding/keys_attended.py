"""How many keys the draft passes of a round attended."""

from __future__ import annotations

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
    windows = {i: layer.window for i, layer in enumerate(cache.layers) if layer.lengths is not None}
    chosen: dict[int, list[float]] = {}
    if selections:
        # One transfer from the device for all layers.
        means = _mean_counts(list(selections.values()))
        chosen = dict(zip(selections, means.tolist(), strict=True))
    attended = []
    for row, base in enumerate(bases):
        read = full = 0.0
        for layer, window in windows.items():
            for ends in passes:
                length = base + ends[row]
                visible = length if window is None else min(window, length)
                here = chosen[layer][row] + length - base if layer in chosen else visible
                read += min(here, visible) / len(windows)
                full += visible / len(windows)
        attended.append((read, full))
    return attended


def _mean_counts(selections: list[Selection]) -> Tensor:
    """Return the mean over KV heads of each selection's counts, `[len(selections), B]`."""
    counts = [s.counts for s in selections]
    if len({c.shape for c in counts}) == 1:
        return torch.cat(counts).float().mean(dim=1).view(len(counts), -1)
    return torch.stack([c.float().mean(dim=1) for c in counts])
