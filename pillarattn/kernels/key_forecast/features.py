"""What a forecast knows of each key: four remembered numbers, and features that they are read as.

All features are square roots of attention mass, or of a made-up mass of that size, so that the
largest keys do not drown the others and one set of weights can mix them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# A head that moves on one key a token loses a fifth of its hold on a key at each step.
SPREAD_DECAY = 0.8
# What one round leaves of the running mean and of the running maximum.
AVERAGE_DECAY = 0.8
PEAK_DECAY = 0.9
# Largest code of a remembered mass.
TOP_CODE = 255
# The mass that a constant, or a key found by its token, stands for.
CONSTANT_MASS = 1e-4
MATCH_MASS = 1e-2


@dataclass(frozen=True)
class KeyRecord:
    """What is remembered of every key, `[R, Hkv, S]` fp32 each; 0 where nothing is known.

    Attributes:
        now: mean mass in the last verify pass.
        last: mass in that pass's last row.
        average: running mean of `now` over rounds.
        peak: running maximum of `now` over rounds.
        matches: `[R, S]`, see `token_matches`; None without tokens.
    """

    now: Tensor
    last: Tensor
    average: Tensor
    peak: Tensor
    matches: Tensor | None = None


def followed(
    before: KeyRecord | None, now: Tensor, last: Tensor, matches: Tensor | None
) -> KeyRecord:
    """Return the record after one more verify pass; `before` None starts one."""
    if before is None:
        return KeyRecord(now, last, now, now, matches)
    average = torch.lerp(now, before.average, AVERAGE_DECAY)
    return KeyRecord(now, last, average, torch.maximum(now, PEAK_DECAY * before.peak), matches)


def stored(mass: Tensor, dtype: torch.dtype) -> Tensor:
    """Return masses as they are remembered: codes for uint8, else numbers of `dtype`."""
    return to_codes(mass) if dtype == torch.uint8 else mass.to(dtype)


def masses(remembered: Tensor) -> Tensor:
    """Return what `stored` was given, fp32."""
    return from_codes(remembered) if remembered.dtype == torch.uint8 else remembered.float()


def to_codes(mass: Tensor) -> Tensor:
    """Return masses 0..1 as uint8: the fourth root in 255 steps, so that small ones keep digits.

    1e-4 is kept to 8 %, 0.1 to 1.4 %; what is below 1.5e-11 becomes 0.
    """
    return (mass.clamp(0, 1).sqrt_().sqrt_() * TOP_CODE).round_().to(torch.uint8)


def from_codes(codes: Tensor) -> Tensor:
    """Return the masses of `to_codes`, fp32."""
    return (codes.float() / TOP_CODE).square_().square_()


def spread(mass: Tensor) -> Tensor:
    """Return each key's best of its own mass and its 8 left neighbours', less a fifth a step.

    A head that reads a text along moves forward with it: the keys after the ones it reads now are
    the ones it reads next.
    """
    out = mass
    for step in (1, 2, 4):
        out = torch.maximum(out, shifted(out, step) * SPREAD_DECAY**step)
    return torch.maximum(mass, shifted(out, 1) * SPREAD_DECAY)


def shifted(mass: Tensor, step: int) -> Tensor:
    """Return the mass of the key `step` positions to the left; 0 where there is none."""
    return pad(mass[..., : max(mass.shape[-1] - step, 0)], (min(step, mass.shape[-1]), 0))


def token_matches(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return, for each key, how near it follows an earlier occurrence of the newest token.

    Args:
        tokens: `[R, S + 1]` int64, the token at each position; negative where unknown. The newest
            one, at `lengths`, has no key yet: it is the next draft step's input.
        lengths: `[R]` int64.

    Returns:
        `[R, S]` fp32: `MATCH_MASS` at the occurrences and the keys after them, less a fifth for
        each position further, 0 beyond 9 of them and past the row's length.
    """
    newest = tokens.gather(1, lengths.unsqueeze(-1))
    line = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    inside = line < lengths.unsqueeze(-1)
    found = ((tokens[:, :-1] == newest) & (newest >= 0) & inside).float()
    return torch.maximum(found, spread(shifted(found, 1))) * inside * MATCH_MASS


def _matches(record: KeyRecord) -> Tensor:
    if record.matches is None:
        return torch.zeros_like(record.now)
    return record.matches.unsqueeze(1).expand_as(record.now)


FEATURES: dict[str, Callable[[KeyRecord], Tensor]] = {
    "now": lambda record: record.now,
    "last": lambda record: record.last,
    "average": lambda record: record.average,
    "peak": lambda record: record.peak,
    "spread_now": lambda record: spread(record.now),
    "spread_last": lambda record: spread(record.last),
    "spread_average": lambda record: spread(record.average),
    "left_1": lambda record: shifted(record.now, 1),
    "left_2": lambda record: shifted(record.now, 2),
    "left_3": lambda record: shifted(record.now, 3),
    "match": _matches,
    "constant": lambda record: torch.full_like(record.now, CONSTANT_MASS),
}


def stack_features(record: KeyRecord, names: Sequence[str]) -> Tensor:
    """Return the features of every key, `[R, Hkv, F, S]` fp32."""
    return torch.stack([FEATURES[name](record) for name in names], dim=-2).clamp_min_(0).sqrt_()
