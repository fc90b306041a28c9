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

# Bytes that the features of some rows may take at once.
MEMORY = 96 * 2**20


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
    record = KeyRecord(masses(now), masses(last), masses(average), masses(peak), matches)
    for first, end in _pieces(target, count):
        found = stack_features(record.rows(first, end), features)
        weighted = found * target[first:end].unsqueeze(-2)
        moments[first:end] = weighted @ found.transpose(-1, -2)
        right[first:end] = (weighted @ target[first:end].unsqueeze(-1)).squeeze(-1)
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
    now, last = (mass.float().masked_fill(hidden, 0.0) for mass in (now, last))
    before = None
    if average is not None and peak is not None:
        # What a running mean and maximum do not need is not known here.
        before = KeyRecord(now, last, masses(average), masses(peak))
    record = followed(before, now, last, matches)
    forecast = torch.empty_like(now)
    for first, end in _pieces(now, len(features)):
        found = stack_features(record.rows(first, end), features)
        forecast[first:end] = (weights[first:end].unsqueeze(-2) @ found).squeeze(-2)
    mass = forecast.clamp_min_(0).square_()
    return mass, stored(record.average, state_dtype), stored(record.peak, state_dtype)


def _pieces(mass: Tensor, features: int) -> list[tuple[int, int]]:
    """Return ranges of rows whose features fit the memory that they may take."""
    rows, heads, size = mass.shape
    step = max(1, MEMORY // (4 * heads * max(size, 1) * features))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
