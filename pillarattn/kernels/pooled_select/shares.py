"""What a row's even budgets leave to the ranking, and which positions it may choose from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shares:
    """Each row's forced positions and the contested ones between them, `[R]` int64 each.

    Attributes:
        begins, ends: positions that a row may keep.
        lows, highs: contested ones; those outside are forced.
        left: contested positions that one KV head's even budget has room for.
    """

    begins: Tensor
    ends: Tensor
    lows: Tensor
    highs: Tensor
    left: Tensor


def shares_of(
    *, lengths: Tensor, budgets: Tensor, recent: Tensor, sink: int, starts: Tensor
) -> Shares:
    """Return the shares; the arguments are those of `kernels.pooled_select`."""
    ends, begins = lengths.long(), torch.minimum(starts.long(), lengths.long())
    kept = torch.minimum(budgets.long(), ends - begins)
    newest = torch.minimum(recent.long(), kept)
    oldest = (kept - newest).clamp_max(sink)
    return Shares(begins, ends, begins + oldest, ends - newest, kept - newest - oldest)
