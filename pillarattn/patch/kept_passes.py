"""Recorded passes that outlive their run, and what another run must share to go on with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.captured_passes import CapturedPasses
from pillarattn.patch.fused_layers import is_switch
from pillarattn.patch.joined_weights import JoinedWeights
from pillarattn.patch.obstacle import obstacle, users_hooks

# Modules that a setting cannot change, so that most of a model need not be looked into.
STATELESS = (nn.Linear, nn.Embedding, nn.Identity, nn.SiLU, nn.ModuleList)
PLAIN = (bool, int, float, str, torch.dtype, type(None))
# What PyTorch itself keeps in a module.
_INTERNAL = vars(nn.Module()).keys()


@dataclass
class KeptPasses:
    """The cache of a run that has ended, with the passes recorded over it.

    Attributes:
        captured: the passes.
        joined: copies of weights that they read, or None.
    """

    captured: CapturedPasses
    joined: JoinedWeights | None

    def restart(self) -> PillarCache:
        """Return the cache, emptied; its buffers stay where the recordings expect them."""
        cache = self.captured.cache
        for layer in cache.layers:
            layer.lengths = None
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
    if obstacle(model, PillarCache(config=model.config)) is not None or code is None:
        return None
    if torch.is_autocast_enabled(input_ids.device.type):
        # Weights in half precision are copies that end with the user's block.
        return None
    tensors = [*model.parameters(), *model.buffers()]
    if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
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
    parts, configs = [], {}
    for module in model.modules():
        # A copy: other threads put forwards in and take them out.
        own = dict(vars(module))
        if _is_replaced(module, own.pop("forward", None)):
            return None
        parts.append(_part_of(module, own))
        configs.update({id(v): v for v in own.values() if isinstance(v, PreTrainedConfig)})
    kinds = frozenset((p.dtype, p.device) for p in model.parameters())
    return kinds, tuple(parts), tuple(_plain(vars(config)) for config in configs.values())


def _part_of(module: Any, own: dict[str, Any]) -> Any:
    kind = type(module)
    settings = () if kind in STATELESS else _plain({n: own[n] for n in own.keys() - _INTERNAL})
    hooks = tuple(users_hooks(module))
    return kind, kind.forward, module.training, hooks, settings


def _is_replaced(module: Any, own: Any) -> bool:
    """Whether a module has a forward of its own: another one may come to lie where it was."""
    if own is None or is_switch(own):
        return False
    return getattr(own, "__func__", None) is not type(module).forward


def _plain(value: Any) -> Any:
    """Return a setting in a hashable form; of a tensor its place, of objects nothing."""
    if type(value) is Tensor:
        return value.data_ptr(), value.dtype, value.shape, value.stride()
    if isinstance(value, dict):
        return frozenset((repr(name), _plain(one)) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_plain, value))
    return value if isinstance(value, PLAIN) else None
