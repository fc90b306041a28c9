"""The forecast of keys: what a regression sees of each key, and what it expects of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_integers, check_one_device, check_shape
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.key_forecast import reference
from pillarattn.kernels.key_forecast.features import FEATURES

__all__ = ["FEATURES", "STATE_DTYPES", "forecast_mass", "forecast_moments"]

STATE_DTYPES = (torch.uint8, torch.float32)
# What the Triton kernels can compute; a feature of your own takes the reference.
COMPILED = frozenset(FEATURES)

for _op in ("forecast_mass", "forecast_moments"):
    register(_op, "reference", getattr(reference, _op))
    register(_op, "triton", f"pillarattn.kernels.key_forecast.launch:{_op}")


def forecast_moments(
    now: Tensor,
    last: Tensor,
    average: Tensor,
    peak: Tensor,
    matches: Tensor | None,
    target: Tensor,
    *,
    features: Sequence[str],
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the sums that a regression of `target` on the features of the keys needs.

    With y the target and f a key's features, they are `sum y f f'` and `sum y**2 f` over the keys:
    each key counts as much as its target.

    Args:
        now, last, average, peak: `[R, Hkv, S]`, the record of the keys (`KeyRecord`), all uint8
            codes or all fp32.
        matches: `[R, S]` fp32 (`token_matches`), or None for none.
        target: `[R, Hkv, S]` fp32, >= 0; 0 takes a key out.
        features: names out of `FEATURES`, F of them.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[R, Hkv, F, F]` and `[R, Hkv, F]` fp32.

    Raises:
        ValueError: a shape, dtype, device or name is wrong.
    """
    record: dict[str, Tensor | None] = {
        "now": now, "last": last, "average": average, "peak": peak,
    }  # fmt: skip
    _check("target", target, record, matches, features)
    for name, tensor in (("last", last), ("average", average), ("peak", peak)):
        if tensor.dtype != now.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} but now is {now.dtype}; convert one of them"
            )
    compute = choose("forecast_moments", implementation, target, now, unsupported=_limits(features))
    found: tuple[Tensor, Tensor] = compute(
        now, last, average, peak, matches, target, features=tuple(features)
    )
    return found


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
    state_dtype: torch.dtype = torch.uint8,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mass that each key is expected to get, and the record after this verify pass.

    Args:
        now: `[R, Hkv, S]` fp32, mean mass of each key in the verify pass; what lies at or past
            `lengths` is undefined.
        last: likewise, mass in its last row.
        average, peak: `[R, Hkv, S]` of `state_dtype`, what was remembered; None at the first pass.
        matches: `[R, S]` fp32 (`token_matches`), or None for none.
        weights: `[R, Hkv, F]` fp32, of the features.
        lengths: `[R]`.
        features: names out of `FEATURES`, F of them.
        state_dtype: uint8 (codes, see `to_codes`) or fp32.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `max(0, weights . features)**2`, `[R, Hkv, S]` fp32; and the new `average` and `peak`.

    Raises:
        ValueError: a shape, dtype, device or name is wrong.
    """
    if state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype must be uint8 or float32, got {state_dtype}")
    if (average is None) != (peak is None):
        raise ValueError("average and peak are given both, or neither at the first pass")
    known = {"average": average, "peak": peak} if average is not None else {}
    for name, tensor in known.items():
        if tensor is not None and tensor.dtype != state_dtype:
            raise ValueError(
                f"{name} must be {state_dtype} as state_dtype says, not {tensor.dtype}"
            )
    _check("now", now, {"last": last, **known}, matches, features)
    if last.dtype != now.dtype:
        raise ValueError(f"last must be float32 as now is, got {last.dtype}; convert it")
    check_shape("weights", weights, (*now.shape[:2], len(features)), "[R, Hkv, F]")
    check_integers("lengths", lengths, (now.shape[0],), "[R]")
    check_one_device(now=now, weights=weights, lengths=lengths)
    compute = choose("forecast_mass", implementation, now, weights, unsupported=_limits(features))
    found: tuple[Tensor, Tensor, Tensor] = compute(
        now, last, average, peak, matches, weights,
        lengths=lengths, features=tuple(features), state_dtype=state_dtype,
    )  # fmt: skip
    return found


def _check(
    what: str,
    like: Tensor,
    record: dict[str, Tensor | None],
    matches: Tensor | None,
    features: Sequence[str],
) -> None:
    """Raise `ValueError` unless all describe the same keys as the masses `like`, by known names."""
    check_shape(what, like, (None,) * 3, "[R, Hkv, S]")
    if like.dtype != torch.float32:
        raise ValueError(f"{what} must be float32, got {like.dtype}; convert it")
    for name, tensor in record.items():
        if tensor is None:
            continue
        check_shape(name, tensor, tuple(like.shape), "[R, Hkv, S]")
        if tensor.dtype not in STATE_DTYPES:
            raise ValueError(f"{name} must be uint8 or float32, got {tensor.dtype}; convert it")
    if matches is not None:
        check_shape("matches", matches, (like.shape[0], like.shape[2]), "[R, S]")
    check_one_device(like=like, matches=matches, **record)
    unknown = [name for name in features if name not in FEATURES]
    if unknown or not features:
        raise ValueError(
            f"features must be names out of {', '.join(FEATURES)}; got {list(features)!r}"
        )


def _limits(features: Sequence[str]) -> str | None:
    """Return what of the features the Triton kernels do not take, or None."""
    own = [name for name in features if name not in COMPILED]
    if own:
        return f"features of your own, {', '.join(own)}"
    if len(set(features)) < len(features):
        return "a feature twice"
    return None
