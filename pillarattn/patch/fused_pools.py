"""What fused layers must know of a cache: pools of slots, which they write themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.modules.cache import ContiguousLayer
from pillarattn.patch.cache_adapter import PillarCache


@dataclass(frozen=True)
class OpenPools:
    """Where the new tokens of a pass go in one layer.

    Attributes:
        keys, values: `[slots, Hkv, D]`, written by who opened them.
        slots: `[B * Q]` int64, the same for all layers.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor


class FusedPools(Protocol):
    """A cache whose tokens are written by the kernel that makes them, not by `Cache.update`.

    Attributes:
        cache: the one that the model is called with; it has `layers`, `step` and `attention`.
    """

    cache: Any

    def begin(self) -> None:
        """Forget what held for the pass before."""

    def open(self, index: int, hidden: Tensor, *, heads: int, dim: int) -> OpenPools | None:
        """Return where the keys of `hidden` `[B, Q, H]` go in layer `index`.

        None: they have no place there as they are, and the model's own code must find one.
        """

    def advance(self, index: int, width: int) -> tuple[Tensor, Tensor]:
        """Count `width` tokens a row as written; return keys and values for attention."""


class ContiguousPools:
    """A `PillarCache` as pools: slot `b Hkv C + i` is token i of row b.

    Args:
        cache: its buffers stay where they are; what does not fit them is not taken.
    """

    def __init__(self, cache: PillarCache) -> None:
        self.cache = cache
        # Slots of the pass that runs: all its layers write to the same places.
        self._slots: tuple[RowLengths, int, Tensor] | None = None

    def begin(self) -> None:
        """Forget the slots: lengths may have been written to."""
        self._slots = None

    def open(self, index: int, hidden: Tensor, *, heads: int, dim: int) -> OpenPools | None:
        """See `FusedPools.open`; None too before a layer has buffers."""
        if index >= len(self.cache.layers):
            return None
        held: Any = self.cache.layers[index]
        if not _holds(held, hidden, (heads, dim)):
            return None
        slots = self._places(held, hidden.shape[1])
        return OpenPools(_as_pool(held.key_buffer), _as_pool(held.value_buffer), slots)

    def advance(self, index: int, width: int) -> tuple[Tensor, Tensor]:
        """See `FusedPools.advance`."""
        return self.cache.layers[index].advance(width)

    def _places(self, held: ContiguousLayer, width: int) -> Tensor:
        """Return the slot of each new token in `_as_pool` of any layer, `[B * Q]` int64."""
        lengths = held.lengths
        assert lengths is not None
        assert held.key_buffer is not None
        capacity = held.capacity * held.key_buffer.shape[1]
        if self._slots is None or self._slots[:2] != (lengths, capacity):
            first = torch.arange(len(lengths.host), device=lengths.device) * capacity
            ahead = torch.arange(width, device=lengths.device)
            slots = (first + lengths.tensor).unsqueeze(-1) + ahead
            self._slots = lengths, capacity, slots.reshape(-1)
        return self._slots[2]


def _holds(held: Any, hidden: Tensor, heads: tuple[int, int]) -> bool:
    """Whether a cache layer keeps these tokens' keys as they are, and has its buffers already.

    Args:
        held: the layer.
        hidden: `[B, Q, H]`.
        heads: Hkv and D.
    """
    if not isinstance(held, ContiguousLayer) or held.lengths is None or held.key_buffer is None:
        return False
    key, value = held.key_buffer, held.value_buffer
    return (
        held.holds_attended_keys
        and key.dtype == hidden.dtype
        and value is not None
        and value.shape == key.shape
        and (key.shape[1], key.shape[3]) == heads
        and held.lengths.max + hidden.shape[1] <= held.capacity
    )


def _as_pool(buffer: Tensor) -> Tensor:
    """Return `[B, Hkv, C, D]` as slots, `[((B - 1) Hkv + 1) C, Hkv, D]`, without a copy."""
    batch, heads, capacity, dim = buffer.shape
    size = ((batch - 1) * heads + 1) * capacity
    return buffer.as_strided((size, heads, dim), (dim, capacity * dim, 1))
