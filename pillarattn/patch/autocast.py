"""Under `torch.autocast` attention rounds what it is given: caches keep it rounded already."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return what this thread computes with on devices of a kind; None outside of autocast."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def outside(kind: str) -> AbstractContextManager[None]:
    """Leave an autocast block for a while: what is tried there is the model, not its rounding."""
    if autocast_dtype(kind) is None:
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def carried(kind: str, call: Callable[[], T]) -> Callable[[], T]:
    """Return a call for another thread, which knows nothing of the autocast block of this one."""
    dtype = autocast_dtype(kind)
    if dtype is None:
        return call

    def run() -> T:
        with torch.autocast(kind, dtype):
            return call()

    return run


def as_attended(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys or values in the dtype that attention computes with.

    A model of fp32 weights makes values in autocast's dtype, and by its rotation keys and queries
    in fp32. PyTorch's attention rounds them all, so that nothing is lost by doing so beforehand,
    once a token. Outside of autocast they come back as they are.
    """
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(t.to(dtype) if t.dtype is not torch.float64 else t for t in tensors)
