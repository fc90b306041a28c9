"""The table of implementations, and the one rule that picks from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pillarattn.config import KERNEL_CHOICES
from pillarattn.errors import UnknownNameError

Implementation = Callable[..., Any]

_TABLE: dict[tuple[str, str], Implementation] = {}


def register(op: str, name: str, function: Implementation) -> None:
    """File `function` as implementation `name` ("reference" or "triton") of `op`.

    Raises:
        ValueError: `name` is not an implementation's name, or another function has the place.
    """
    allowed = [choice for choice in KERNEL_CHOICES if choice != "auto"]
    if name not in allowed:
        raise ValueError(f"an implementation is named {' or '.join(allowed)}, got {name!r}")
    taken = _TABLE.get((op, name))
    # A reloaded module registers the same function again: that is no conflict.
    if taken is not None and _identity(taken) != _identity(function):
        raise ValueError(
            f"{op} already has a {name} implementation, {'.'.join(_identity(taken))}; "
            "an op has one implementation of each name"
        )
    _TABLE[op, name] = function


def implementations(op: str) -> list[str]:
    """Return the sorted names of what is registered for `op`; an unknown op has none."""
    return sorted(name for registered, name in _TABLE if registered == op)


def choose(op: str, implementation: str, *tensors: Tensor) -> Implementation:
    """Return the function that computes `op` on `tensors`.

    "auto" is Triton where the op has a Triton implementation and every tensor is on CUDA, and the
    reference otherwise. An explicit name never falls back to another implementation.

    Raises:
        ValueError: the op or the name is unknown, or "triton" was asked for where it cannot run.
    """
    names = implementations(op)
    if not names:
        ops = sorted({registered for registered, _ in _TABLE})
        raise UnknownNameError(f"unknown op {op!r}; choose one of {', '.join(ops)}")
    if implementation not in KERNEL_CHOICES:
        raise UnknownNameError(
            f"unknown implementation {implementation!r}; choose one of {', '.join(KERNEL_CHOICES)}"
        )
    on_cuda = all(tensor.is_cuda for tensor in tensors)
    if implementation == "auto":
        return _TABLE[op, "triton" if on_cuda and "triton" in names else "reference"]
    if implementation not in names:
        raise ValueError(
            f"{op} has no {implementation} implementation, only {', '.join(names)}; "
            "pass one of these, or 'auto'"
        )
    if implementation == "triton" and not on_cuda:
        devices = sorted({str(tensor.device) for tensor in tensors})
        raise ValueError(
            f"implementation='triton' needs tensors on CUDA, got {', '.join(devices)}; "
            "move them, or pass 'reference' or 'auto'"
        )
    return _TABLE[op, implementation]


def _identity(function: Implementation) -> tuple[str, str]:
    return function.__module__, getattr(function, "__qualname__", repr(function))
