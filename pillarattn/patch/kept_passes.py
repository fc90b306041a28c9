"""Recorded passes that outlive their run, and what another run must share to go on with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.captured_passes import CapturedPasses
from pillarattn.patch.compiled_parts import wants_compiled
from pillarattn.patch.fused_layers import FusedLayers, is_switch
from pillarattn.patch.model_parts import buffers_of, hooked, modules_of, parameters_of
from pillarattn.patch.obstacle import obstacle, users_hooks

# Modules that a setting cannot change, so that most of a model need not be looked into.
STATELESS = {nn.Linear, nn.Embedding, nn.Identity, nn.SiLU, nn.ModuleList}
PLAIN = {bool, int, float, str, torch.dtype, type(None)}
TENSORS = {Tensor, nn.Parameter}
# What PyTorch itself keeps in a module; a forward is judged apart.
_NO_SETTING = frozenset((*vars(nn.Module()), "forward"))


@dataclass
class KeptPasses:
    """The cache of a run that has ended, with the passes recorded over it.

    Attributes:
        captured: the passes.
        fused: layers that they run, which hold parts of the model, but not the model; or None.
    """

    captured: CapturedPasses
    fused: FusedLayers | None

    def restart(self) -> PillarCache:
        """Return the cache, emptied; its buffers stay where the recordings expect them."""
        cache = self.captured.cache
        cache.begin_anew()
        return cache


def kind_of(model: Any, input_ids: Tensor, *, kernels: str, strict: bool, code: Any) -> Any:
    """Return what two runs must share to use the same recordings; None where none are made.

    A recording holds addresses: of weights that were replaced, or moved, it must not be replayed.

    Args:
        model: patched.
        input_ids: `[B, L]`.
        kernels, strict: of the call.
        code: what `code_of` says of the model.
    """
    # Nothing is kept of a model whose own cache is an obstacle: there is no need to make one here.
    if code is None or obstacle(model, PillarCache()) is not None:
        return None
    if torch.is_autocast_enabled(input_ids.device.type):
        # Weights in half precision are copies that end with the user's block.
        return None
    modules = modules_of(model)
    tensors = parameters_of(modules) + buffers_of(modules)
    if not set(map(type, tensors)) <= TENSORS:
        # Only such a tensor itself knows where its numbers are.
        return None
    return (
        id(model), input_ids.shape[0], kernels, strict, torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), code,
        tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors),
    )  # fmt: skip


def code_of(model: Any) -> Any:
    """Return what decides which code a model runs, hashable; None: nothing can tell.

    Hooks, adapters, switches and replaced parts change what runs.
    """
    modules, parts = modules_of(model), []
    heard = {id(module): tuple(users_hooks(module)) for module in hooked(modules)}
    configs: dict[int, Any] = {}
    for module in modules:
        kind, own = type(module), vars(module)
        if "forward" in own and _is_replaced(module, own.get("forward")):
            return None
        settings = () if kind in STATELESS else _settings(own, configs)
        parts.append((kind, kind.forward, own["training"], heard.get(id(module), ()), settings))
    kinds = frozenset((p.dtype, p.device) for p in parameters_of(modules))
    plain = tuple(_plain(vars(config)) for config in configs.values())
    return kinds, tuple(parts), plain, wants_compiled()


def _settings(own: dict[str, Any], configs: dict[int, Any]) -> Any:
    """Return what a module keeps, hashable; its configs, which many share, go to `configs`."""
    found = []
    # A copy: other threads put forwards in and take them out.
    for name, value in own.copy().items():
        if name in _NO_SETTING:
            continue
        kind = type(value)
        if kind in PLAIN:
            found.append((name, value))
            continue
        # Of its type, not of itself: configs look up all that is asked of them in many places.
        if issubclass(kind, PreTrainedConfig):
            configs[id(value)] = value
        found.append((name, _plain(value)))
    return frozenset(found)


def _is_replaced(module: Any, own: Any) -> bool:
    """Whether a module has a forward of its own: another one may come to lie where it was."""
    if own is None or is_switch(own):
        return False
    return getattr(own, "__func__", None) is not type(module).forward


def _plain(value: Any) -> Any:
    """Return a setting in a hashable form; of a tensor its place, of objects nothing."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is Tensor:
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    if issubclass(kind, dict):
        return frozenset([(_name(name), _plain(one)) for name, one in value.items()])
    if issubclass(kind, (list, tuple)):
        return tuple(map(_plain, value))
    if issubclass(kind, (set, frozenset)):
        return frozenset(map(_plain, value))
    # Such as the members of an enumeration that are numbers too.
    return value if issubclass(kind, (int, float, str)) else None


def _name(name: Any) -> Any:
    """Return a key of a dictionary in a form that no other key has."""
    return name if type(name) is str else (type(name), repr(name))
