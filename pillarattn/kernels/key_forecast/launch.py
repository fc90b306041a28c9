"""Launches of the forecast's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.kernels.key_forecast.features import (
    AVERAGE_DECAY,
    CONSTANT_MASS,
    FEATURES,
    PEAK_DECAY,
)
from pillarattn.kernels.key_forecast.triton_kernel import mass_kernel, moments_kernel

# Keys a step: their 16 features are one operand of a small matrix product.
MOMENT_KEYS = 128
MASS_KEYS = 512
# Programs that keep a large GPU busy; fewer pairs than that are split.
WAVE = 1024


def forecast_moments(
    now: Tensor,
    last: Tensor,
    average: Tensor,
    peak: Tensor,
    matches: Tensor | None,
    target: Tensor,
    *,
    features: tuple[str, ...],
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.forecast_moments`; `splits` of a head's keys (None: by their number)."""
    rows, heads, size = target.shape
    count, pairs = len(features), rows * heads
    steps = max(1, -(-size // MOMENT_KEYS))
    splits = min(splits or max(1, -(-WAVE // max(pairs, 1))), steps)
    span = -(-steps // splits) * MOMENT_KEYS
    sums = target.new_zeros(pairs, splits, 16, 16)
    if not target.numel():
        whole = sums.sum(dim=1)
        return _parted(whole, rows, heads, count)
    now, last, average, peak, target = (t.contiguous() for t in (now, last, average, peak, target))
    matches = None if matches is None else matches.contiguous()
    with torch.cuda.device_of(target):
        moments_kernel[(pairs, splits)](
            now, last, average, peak, matches, target, sums,
            now.stride(0), now.stride(1), 0 if matches is None else matches.stride(0),
            target.stride(0), target.stride(1), heads, size, span, splits,
            CODES=now.dtype == torch.uint8, BLOCK=MOMENT_KEYS, num_warps=4,
            **_constants(features, matches),
        )  # fmt: skip
    return _parted(sums.sum(dim=1), rows, heads, count)


def forecast_mass(
    now: Tensor,
    last: Tensor,
    average: Tensor | None,
    peak: Tensor | None,
    matches: Tensor | None,
    weights: Tensor,
    *,
    lengths: Tensor,
    features: tuple[str, ...],
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `kernels.forecast_mass` in one launch."""
    rows, heads, size = now.shape
    mass = torch.empty(now.shape, dtype=torch.float32, device=now.device)
    new_average, new_peak = (
        torch.empty(now.shape, dtype=state_dtype, device=now.device) for _ in range(2)
    )
    if not mass.numel():
        return mass, new_average, new_peak
    is_first = average is None or peak is None
    now, last = (t if t.stride(2) == 1 else t.contiguous() for t in (now, last))
    # Not read at the first pass; a pointer must be given all the same.
    state = (new_average, new_peak) if average is None or peak is None else (average, peak)
    state = (state[0].contiguous(), state[1].contiguous())
    matches = None if matches is None else matches.contiguous()
    with torch.cuda.device_of(now):
        mass_kernel[(rows * heads, -(-size // MASS_KEYS))](
            now, last, *state, matches, weights.float().contiguous(), lengths.contiguous(),
            mass, new_average, new_peak, *now.stride()[:2], *last.stride()[:2],
            *state[0].stride()[:2], 0 if matches is None else matches.stride(0), heads, size,
            FIRST=is_first, CODES=state_dtype == torch.uint8, BLOCK=MASS_KEYS, num_warps=4,
            AVERAGE_DECAY=AVERAGE_DECAY, PEAK_DECAY=PEAK_DECAY, **_constants(features, matches),
        )  # fmt: skip
    return mass, new_average, new_peak


def _parted(sums: Tensor, rows: int, heads: int, count: int) -> tuple[Tensor, Tensor]:
    whole = sums.view(rows, heads, 16, 16)
    return whole[..., :count, :count].contiguous(), whole[..., :count, count].contiguous()


def _constants(features: tuple[str, ...], matches: Tensor | None) -> dict[str, Any]:
    """Return each feature's place among those asked for, -1 for the others."""
    places = {name.upper(): -1 for name in FEATURES}
    places |= {name.upper(): place for place, name in enumerate(features)}
    return {
        **places, "COUNT": len(features), "HAS_MATCHES": matches is not None,
        "CONSTANT_MASS": CONSTANT_MASS,
    }  # fmt: skip
