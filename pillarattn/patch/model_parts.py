"""The modules and tensors of a model, listed without the names that `nn.Module` makes on the way.

Every call of `generate` looks at all of them before the prompt may run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def modules_of(model: Any) -> list[Any]:
    """Return the model and all modules inside, each once, parents first."""
    found, seen = [model], {id(model)}
    for module in found:
        children = module._modules
        if children:
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
    return found


def parameters_of(modules: list[Any]) -> list[Tensor]:
    """Return the parameters of modules; one that they share comes more than once."""
    return [p for module in modules for p in module._parameters.values() if p is not None]


def buffers_of(modules: list[Any]) -> list[Tensor]:
    """Return the buffers of modules, likewise."""
    return [b for module in modules for b in module._buffers.values() if b is not None]


def hooked(modules: list[Any]) -> list[Any]:
    """Return the modules on whose calls somebody listens."""
    return [module for module in modules if module._forward_hooks or module._forward_pre_hooks]
