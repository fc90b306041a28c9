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
MASS_KEYS = 512
# Programs of one warp that a large GPU runs at once; fewer pairs than that are split.
WAVE = 132 * 16
# What a step to the left leaves of the fourth root of a mass; of a square root, its square.
FADE = SPREAD_DECAY**0.25


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
                CODES=has_codes, LANES=MOMENT_LANES, COUNT=count,
                CHOSEN=tuple(list(FEATURES).index(name) for name in features),
                FADES=tuple((FADE if has_codes else FADE**2) ** step for step in range(13)),
                HAS_MATCHES=matches is not None, CONSTANT_ROOT=CONSTANT_MASS**0.5, num_warps=1,
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
            FIRST=is_first, CODES=state_dtype == torch.uint8, BLOCK=MASS_KEYS, num_warps=4,
            AVERAGE_DECAY=AVERAGE_DECAY, PEAK_DECAY=PEAK_DECAY, **_constants(features, matches),
        )  # fmt: skip
    return mass, new_average, new_peak


def _constants(features: tuple[str, ...], matches: Tensor | None) -> dict[str, Any]:
    """Return each feature's place among those asked for, -1 for the others."""
    places = {name.upper(): -1 for name in FEATURES}
    places |= {name.upper(): place for place, name in enumerate(features)}
    return {
        **places, "COUNT": len(features), "HAS_MATCHES": matches is not None,
        "CONSTANT_MASS": CONSTANT_MASS,
    }  # fmt: skip
