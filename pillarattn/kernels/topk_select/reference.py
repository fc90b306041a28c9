"""Top-K selection in plain PyTorch: scores become integers, so that every tie has one answer."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.topk_select import partition

_INT32 = torch.iinfo(torch.int32)
_FORCED = _INT32.max
_NAN = _INT32.min + 1
_HIDDEN = _INT32.min


def topk_select(
    scores: Tensor,
    *,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    sink: int,
    starts: Tensor,
    capacity: int | None = None,
    most: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.topk_select`; nothing is compiled here, whatever `most` is."""
    rows, kv_heads, size = scores.shape
    positions = torch.arange(size, device=scores.device)
    ends, begins = lengths.long(), starts.long()
    kept = torch.minimum(budgets.long(), (ends - begins).clamp_min(0))
    if capacity is not None:
        kept = kept.clamp_max(capacity)
    # No row can keep more positions than there are.
    limit = min(capacity, size) if capacity is not None else int(kept.max()) if rows else 0
    counts = kept.to(torch.int32).unsqueeze(-1).repeat(1, kv_heads)
    newest = torch.minimum(recent.long(), kept)
    oldest = (kept - newest).clamp_max(sink)

    begins, ends = begins.unsqueeze(-1), ends.unsqueeze(-1)
    forced = (positions >= ends - newest.unsqueeze(-1)) | (
        positions < begins + oldest.unsqueeze(-1)
    )
    hidden = (positions < begins) | (positions >= ends)
    ranks = _ordered_integers(scores)
    ranks = ranks.masked_fill_(forced.unsqueeze(1), _FORCED)
    ranks = ranks.masked_fill_(hidden.unsqueeze(1), _HIDDEN)
    if partition.AVAILABLE and not ranks.is_cuda:
        indices = partition.largest(ranks, kept, limit)
    else:
        indices = _largest(ranks, counts, limit)
    if capacity is not None and capacity > limit:
        indices = torch.nn.functional.pad(indices, (0, capacity - limit))
    return indices, counts


def _largest(ranks: Tensor, counts: Tensor, limit: int) -> Tensor:
    """Compute `partition.largest` by one Top-K over integers that are all different."""
    size = ranks.shape[-1]
    positions = torch.arange(size, device=ranks.device)
    # The position in the low half makes all keys different, which settles ties for any Top-K.
    unique = (ranks.long() << 32) | (size - 1 - positions)
    best = unique.topk(limit, dim=-1).indices.to(torch.int32)
    unused = torch.arange(limit, device=ranks.device) >= counts.unsqueeze(-1)
    indices = best.masked_fill_(unused, size).sort(dim=-1).values
    return indices.masked_fill_(unused, 0)


def _ordered_integers(scores: Tensor) -> Tensor:
    """Return int32 in the order of the scores, NaN lowest; a new tensor."""
    # Adding zero turns -0.0 into 0.0, which compare equal and must tie.
    floats = scores.detach().float() + 0.0
    bits = floats.view(torch.int32)
    if not floats.is_cuda and floats.numel():
        # Probabilities, as a rule, and NaN fails the test: their bits are in order already.
        low, high = floats.aminmax()
        if bool(low >= 0.0) and bool(high < float("inf")):
            return bits
    # Negative floats grow in magnitude with their bits: flip all but the sign.
    ordered = bits ^ ((bits >> 31) & _INT32.max)
    return ordered.masked_fill_(floats.isnan(), _NAN)
