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
    SPREAD_DECAY,
)
from pillarattn.kernels.key_forecast.triton_kernel import mass_kernel, moments_kernel

# Lanes of a step of the moments, four keys each: one warp, so that no program waits for another.
MOMENT_LANES = 32
# Of the masses, and keys of a program.
MASS_LANES, MASS_KEYS = 128, 2048
# Programs of one warp that a large GPU runs at once; fewer pairs than that are split.
WAVE = 132 * 16


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
    count, pairs, keys = len(features), rows * heads, 4 * MOMENT_LANES
    steps = max(1, -(-size // keys))
    splits = min(splits or max(1, WAVE // max(pairs, 1)), steps)
    span = -(-steps // splits) * keys
    sums = target.new_zeros(pairs, splits, count, count + 1)
    if target.numel():
        record = [t.contiguous() for t in (now, last, average, peak)]
        target = target.contiguous()
        matches = None if matches is None else matches.contiguous()
        has_codes = now.dtype == torch.uint8
        with torch.cuda.device_of(target):
            moments_kernel[(pairs, splits)](
                *record, matches, target, sums,
                *record[0].stride()[:2], 0 if matches is None else matches.stride(0),
                *target.stride()[:2], heads, size, span, splits,
                CODES=has_codes, LANES=MOMENT_LANES, num_warps=1,
                # A code is the fourth root of a mass, what is made of a number the square root.
                FADES=_fades(SPREAD_DECAY ** (0.25 if has_codes else 0.5)),
                **_constants(features, matches),
            )  # fmt: skip
    whole = (sums[:, 0] if splits == 1 else sums.sum(dim=1)).view(rows, heads, count, count + 1)
    return whole[..., :count].contiguous(), whole[..., count].contiguous()


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
            MASS_KEYS, FIRST=is_first, CODES=state_dtype == torch.uint8, LANES=MASS_LANES,
            FADES=_fades(SPREAD_DECAY), AVERAGE_DECAY=AVERAGE_DECAY, PEAK_DECAY=PEAK_DECAY,
            num_warps=4, **_constants(features, matches),
        )  # fmt: skip
    return mass, new_average, new_peak


def _fades(decay: float) -> tuple[float, ...]:
    """Return what 0 to 12 steps to the left leave."""
    return tuple(decay**step for step in range(13))


def _constants(features: tuple[str, ...], matches: Tensor | None) -> dict[str, Any]:
    """Return the places of the chosen features in `FEATURES`, and what they need to know."""
    places = list(FEATURES)
    return {
        "CHOSEN": tuple(places.index(name) for name in features), "COUNT": len(features),
        "HAS_MATCHES": matches is not None, "CONSTANT_ROOT": CONSTANT_MASS**0.5,
    }  # fmt: skip
