"""The table of implementations, and the one rule that picks from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pillarattn.config import KERNEL_CHOICES
from pillarattn.errors import UnknownNameError

Implementation = Callable[..., Any]

# A function, or "module:function" that is imported when it is first chosen.
_TABLE: dict[tuple[str, str], Implementation | str] = {}


def register(op: str, name: str, function: Implementation | str) -> None:
    """File `function` as implementation `name` ("reference" or "triton") of `op`.

    Args:
        op: the op's name.
        name: the implementation's name.
        function: the function, or `"module:function"`, imported when first chosen, so that
            importing the library needs no Triton.

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
            f"{op} already has a {name} implementation, {_identity(taken)}; "
            "an op has one implementation of each name"
        )
    _TABLE[op, name] = function


def implementations(op: str) -> list[str]:
    """Return the sorted names of what is registered for `op`; an unknown op has none."""
    return sorted(name for registered, name in _TABLE if registered == op)


def interpreting() -> bool:
    """Return whether Triton interprets its kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def choose(
    op: str, implementation: str, *tensors: Tensor, unsupported: str | None = None
) -> Implementation:
    """Return the function that computes `op` on `tensors`.

    "auto" is Triton where the op has a Triton implementation that takes these arguments, Triton is
    installed and every tensor is on CUDA; it is the reference otherwise. An explicit name never
    falls back to another implementation. "triton" also runs on the CPU where Triton interprets.

    Args:
        op: a registered op.
        implementation: "auto", "reference" or "triton".
        tensors: what the op reads; their device decides, and whether they need a gradient.
        unsupported: why the Triton implementation cannot take the arguments; None if it can.

    Raises:
        ValueError: the op or the name is unknown, or "triton" was asked for where it cannot run.
    """
    if (
        implementation == "auto"
        and tensors
        and not tensors[0].is_cuda
        and (op, "reference") in _TABLE
    ):
        # On a CPU there is nothing to weigh, and every layer of every step asks.
        return _resolve(op, "reference")
    function = _TABLE.get((op, "triton"))
    if (
        implementation == "auto"
        and unsupported is None
        and callable(function)
        and not torch.is_grad_enabled()
        and tensors
        and all(tensor.is_cuda for tensor in tensors)
    ):
        # Likewise where Triton was imported already, and nothing speaks against it.
        return function
    names = implementations(op)
    if not names:
        ops = sorted({registered for registered, _ in _TABLE})
        raise UnknownNameError(f"unknown op {op!r}; choose one of {', '.join(ops)}")
    if implementation not in KERNEL_CHOICES:
        raise UnknownNameError(
            f"unknown implementation {implementation!r}; choose one of {', '.join(KERNEL_CHOICES)}"
        )
    if implementation == "reference" or (implementation == "auto" and "triton" not in names):
        return _resolve(op, "reference")
    if implementation not in ("auto", *names):
        raise ValueError(
            f"{op} has no {implementation} implementation, only {', '.join(names)}; "
            "pass one of these, or 'auto'"
        )
    reason = _obstacle(op, tensors, unsupported, implementation)
    if reason is None:
        return _resolve(op, "triton")
    if implementation == "auto":
        return _resolve(op, "reference")
    raise ValueError(f"implementation='triton' {reason}, or pass 'reference' or 'auto'")


def _obstacle(
    op: str, tensors: tuple[Tensor, ...], unsupported: str | None, implementation: str
) -> str | None:
    """Return why Triton cannot compute this, as the end of a sentence, or None."""
    devices = sorted({str(tensor.device) for tensor in tensors if not tensor.is_cuda})
    if devices and not (implementation == "triton" and interpreting()):
        return f"needs tensors on CUDA, got {', '.join(devices)}; move them"
    # A function that is there already needs no import.
    if isinstance(_TABLE[op, "triton"], str) and find_spec("triton") is None:
        return "needs the package triton; install pillarattn[triton]"
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors):
        return "has no backward pass; run it under torch.no_grad()"
    if unsupported is not None:
        return f"of {op} does not take {unsupported}; change that"
    return None


def _resolve(op: str, name: str) -> Implementation:
    found = _TABLE[op, name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _TABLE[op, name] = getattr(import_module(module), attribute)
    return found


def _identity(function: Implementation | str) -> str:
    if isinstance(function, str):
        return function.replace(":", ".")
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
