"""Whether a model still computes what it did: keys that were kept are of no use otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.patch.obstacle import users_hooks

# How many parameters are looked at, and how many values of each.
LOOKED_AT, VALUES = 8, 32
# What a tensor's own class raises for an operation that it does not know.
FAULTS = (NotImplementedError, RuntimeError, TypeError, AttributeError)


@torch.no_grad()
def weights_state(model: Any) -> tuple[Any, ...]:
    """Return something that is equal while weights, adapters and hooks are, and else hardly ever.

    Writing in place counts in a tensor's version; writing to `.data` does not, so that some values
    are looked at too: an optimiser's step or newly loaded weights change nearly all of them.
    """
    parameters = list(model.parameters())
    marks = tuple((_place(p), 0 if p.is_inference() else p._version) for p in parameters)
    every = max(1, len(parameters) // LOOKED_AT)
    values = tuple(_some(p) for p in parameters[::every] if p.device.type != "meta")
    adapters = tuple(
        (str(getattr(m, "_active_adapter", None)), bool(getattr(m, "_disable_adapters", False)),
         str(getattr(m, "merged_adapters", None)))
        for m in model.modules()
        if hasattr(m, "_active_adapter")
    )  # fmt: skip
    hooks = tuple(number for m in model.modules() for number in users_hooks(m))
    return marks, values, adapters, hooks


def _place(parameter: Tensor) -> int:
    """Return where the values lie, or which object it is where they lie nowhere."""
    if parameter.device.type == "meta":
        return 0
    try:
        return parameter.data_ptr() or id(parameter)
    except FAULTS:
        return id(parameter)


def _some(parameter: Tensor) -> tuple[float, ...]:
    """Return some values; none of quantised weights that cannot be sliced or converted."""
    try:
        flat = parameter.detach().flatten()
        return tuple(flat[:: max(1, flat.numel() // VALUES)].double().tolist())
    except FAULTS:
        return ()
