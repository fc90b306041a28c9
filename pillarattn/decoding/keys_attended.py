"""How many keys the draft passes of a round attended."""

from __future__ import annotations

import torch

from pillarattn.datatypes import Selection
from pillarattn.modules.cache import ContiguousCache


def keys_attended(
    cache: ContiguousCache, selections: dict[int, Selection], passes: list[list[int]]
) -> list[tuple[float, float]]:
    """Return, by row, the keys that draft passes attended and that full attention would.

    Both are means over layers and KV heads, summed over passes. Of a pass of several rows it is the
    last one that counts, since keys are read once for all of them.

    Args:
        cache: at the length that the round began with.
        selections: the keys that drafts read, by layer; the other layers read all they see.
        passes: see `Draft.passes`.
    """
    if not passes:
        return [(0.0, 0.0)] * len(cache.lengths.host)
    windows = {i: layer.window for i, layer in enumerate(cache.layers) if layer.lengths is not None}
    chosen: dict[int, list[float]] = {}
    if selections:
        # One transfer from the device for all layers, at the end of the drafts.
        means = torch.stack([s.counts.float().mean(dim=1) for s in selections.values()])
        chosen = dict(zip(selections, means.tolist(), strict=True))
    attended = []
    for row, base in enumerate(cache.lengths.host):
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
