"""The forecast of keys in plain PyTorch: some rows at a time, so that features stay small."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pillarattn.kernels.key_forecast.features import (
    KeyRecord,
    followed,
    masses,
    stack_features,
    stored,
)

# Bytes that the features of some rows may take at once: on a CPU what its caches hold (twice as
# fast as 96 MiB for 240 rows of 4,100 keys), on a GPU what leaves few launches.
CPU_MEMORY, MEMORY = 4 * 2**20, 96 * 2**20


def forecast_moments(
    now: Tensor,
    last: Tensor,
    average: Tensor,
    peak: Tensor,
    matches: Tensor | None,
    target: Tensor,
    *,
    features: Sequence[str],
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.forecast_moments`."""
    rows, heads, _ = target.shape
    count = len(features)
    moments = target.new_empty(rows, heads, count, count)
    right = target.new_empty(rows, heads, count)
    for first, end in _pieces(target, count):
        part = slice(first, end)
        record = KeyRecord(
            masses(now[part]),
            masses(last[part]),
            masses(average[part]),
            masses(peak[part]),
            None if matches is None else matches[part],
        )
        found = stack_features(record, features)
        weighted = found * target[part].unsqueeze(-2)
        moments[part] = weighted @ found.transpose(-1, -2)
        right[part] = (weighted @ target[part].unsqueeze(-1)).squeeze(-1)
    return moments, right


def forecast_mass(
    now: Tensor,
    last: Tensor,
    average: Tensor | None,
    peak: Tensor | None,
    matches: Tensor | None,
    weights: Tensor,
    *,
    lengths: Tensor,
    features: Sequence[str],
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `kernels.forecast_mass`."""
    line = torch.arange(now.shape[2], device=now.device)
    hidden = (line >= lengths.unsqueeze(-1)).unsqueeze(1)
    forecast = torch.empty(now.shape, dtype=torch.float32, device=now.device)
    new_average, new_peak = (forecast.new_empty(now.shape, dtype=state_dtype) for _ in range(2))
    for first, end in _pieces(now, len(features)):
        part = slice(first, end)
        here, newest = (mass[part].float().masked_fill(hidden[part], 0.0) for mass in (now, last))
        before = None
        if average is not None and peak is not None:
            # What a running mean and maximum do not need is not known here.
            before = KeyRecord(here, newest, masses(average[part]), masses(peak[part]))
        record = followed(before, here, newest, None if matches is None else matches[part])
        found = stack_features(record, features)
        forecast[part] = (weights[part].unsqueeze(-2) @ found).squeeze(-2)
        new_average[part] = stored(record.average, state_dtype)
        new_peak[part] = stored(record.peak, state_dtype)
    return forecast.clamp_min_(0).square_(), new_average, new_peak


def _pieces(mass: Tensor, features: int) -> list[tuple[int, int]]:
    """Return ranges of rows whose features fit the memory that they may take."""
    rows, heads, size = mass.shape
    memory = MEMORY if mass.is_cuda else CPU_MEMORY
    step = max(1, memory // (4 * heads * max(size, 1) * features))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
