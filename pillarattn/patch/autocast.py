"""Under `torch.autocast` attention rounds what it is given: caches keep it rounded already."""

from __future__ import annotations

import torch
from torch import Tensor


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys or values in the dtype that attention computes with.

    A model of fp32 weights makes values in autocast's dtype, and by its rotation keys and queries
    in fp32. PyTorch's attention rounds them all, so that nothing is lost by doing so beforehand,
    once a token. Outside of autocast they come back as they are.
    """
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype is not torch.float64 else t for t in tensors)
