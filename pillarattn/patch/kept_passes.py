"""Recorded passes that outlive their run, and what another run must share to go on with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.captured_passes import CapturedPasses, obstacle
from pillarattn.patch.joined_weights import JoinedWeights


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


def kind_of(model: Any, input_ids: Tensor, *, kernels: str, strict: bool) -> Any:
    """Return what two runs must share to use the same recordings; None where none are made.

    A recording holds addresses: of weights that were replaced, or moved, it must not be replayed.
    """
    if obstacle(model, PillarCache(config=model.config)) is not None:
        return None
    tensors = [*model.parameters(), *model.buffers()]
    return (
        id(model), input_ids.shape[0], kernels, strict, torch.is_inference_mode_enabled(),
        tuple((t.data_ptr(), t.dtype) for t in tensors),
        # Hooks, adapters and replaced parts change what runs.
        tuple(_code_of(module) for module in model.modules()),
    )  # fmt: skip


def _code_of(module: Any) -> tuple[Any, ...]:
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    own = vars(module).get("forward")
    return type(module), *(tuple(map(id, one.values())) for one in hooks), id(own) if own else None
