"""Why the passes of a model cannot be recorded, if they cannot."""

from __future__ import annotations

from typing import Any

from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.model_parts import hooked, modules_of, parameters_of

# Hooks of these packages do nothing, or look at a first pass alone, unless a run asks for more.
OWN = ("pillarattn", "transformers")


def obstacle(model: Any, cache: PillarCache) -> str | None:
    """Return why no pass of `model` over `cache` can be recorded, or None."""
    if cache.state_layers:
        return "some layers keep recurrent states, which are put back by the host"
    modules = modules_of(model)
    if any(map(users_hooks, hooked(modules))):
        heard = next(name for name, module in model.named_modules() if users_hooks(module))
        return f"a forward hook of {heard or 'the model'} would not be called in a replayed pass"
    devices = {p.device for p in parameters_of(modules)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return f"the weights are on {', '.join(sorted(map(str, devices)))}, not on one GPU"
    return None


def users_hooks(module: Any) -> list[int]:
    """Return the numbers of others' hooks on a module's calls: what they do may change."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return [
        number
        for held in hooks
        for number, hook in held.items()
        if str(getattr(hook, "__module__", "")).split(".")[0] not in OWN
    ]
