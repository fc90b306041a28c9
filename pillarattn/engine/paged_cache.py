"""Keys and values of every request in the pool's blocks, in the shape that models expect."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.engine.block_mover import BlockMover
from pillarattn.engine.block_table import BlockTable, Move
from pillarattn.errors import UnsupportedModelError
from pillarattn.patch.autocast import as_attended
from pillarattn.patch.cache_adapter import ORIGIN
from pillarattn.patch.cache_layers import PillarCacheLayer
from pillarattn.patch.compat import Cache
from pillarattn.patch.fused_pools import OpenPools


class PagedLayer(PillarCacheLayer):
    """One layer's pool: `[slots, Hkv, D]` buffers; the slot of a token is its block and place."""

    @property
    def shape(self) -> Hashable:
        """What layers share whose buffers are alike; None before it has any."""
        if self.key_buffer is None or self.value_buffer is None:
            return None
        keys = self.key_buffer
        return keys.dtype, keys.device, *keys.shape[1:], self.value_buffer.shape[2]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put T tokens `[1, Hkv, T, D]` into `slots` `[T]`."""
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        self.key_buffer.index_copy_(0, slots, keys[0].transpose(0, 1).to(self.key_buffer.dtype))
        self.value_buffer.index_copy_(
            0, slots, values[0].transpose(0, 1).to(self.value_buffer.dtype)
        )

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the tokens in `slots` `[S]`, `[1, Hkv, S, D]` each."""
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        keys, values = (
            buffer.index_select(0, slots).transpose(0, 1).unsqueeze(0)
            for buffer in (self.key_buffer, self.value_buffer)
        )
        return keys, values

    def pool_views(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the whole pool as `[rows, Hkv, slots, D]`, the same for every row, uncopied."""
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        keys, values = (
            buffer.transpose(0, 1).unsqueeze(0).expand(rows, -1, -1, -1)
            for buffer in (self.key_buffer, self.value_buffer)
        )
        return keys, values

    @property
    def kv_heads(self) -> int:
        """KV heads of the pool."""
        return 0 if self.key_buffer is None else int(self.key_buffer.shape[1])


class PagedCache(Cache):
    """The pool of a whole model; a forward pass writes its tokens to the slots it was given.

    Args:
        slots: tokens of the device's pool, of whole blocks. One more block lies behind them, for
            rows of nobody, which fill a pass up to a fixed size.
        host_slots: tokens of the host's.
        block_size: tokens of a block.
        attention: called with a layer's queries: see `PackedAttention`.

    Attributes:
        mover: copies blocks to the host, back, and inside the pool.
    """

    def __init__(self, *, slots: int, host_slots: int, block_size: int, attention: Any) -> None:
        super().__init__(layers=[])
        self.slots, self.block_size = slots, block_size
        self.mover = BlockMover(block_size=block_size, host_blocks=host_slots // block_size)
        self.attention = attention
        self.step: Any = None
        self.written: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's tokens and hand the new ones back, marked with where they belong."""
        key_states, value_states = as_attended(key_states, value_states)
        dims = key_states.shape[3], value_states.shape[3]
        layer = self.layer_for(layer_idx, key_states, heads=key_states.shape[1], dims=dims)
        layer.write(self.step.slots, key_states, value_states)
        keys = key_states.view_as(key_states)
        setattr(keys, ORIGIN, (self, layer_idx))
        self.written = layer_idx
        return keys, value_states

    def layer_for(
        self, index: int, like: Tensor, *, heads: int, dims: tuple[int, int]
    ) -> PagedLayer:
        """Return a layer with its buffers, which are made for such tokens where it has none.

        Args:
            index: of the layer.
            like: a tensor of the tokens' dtype and device.
            heads: Hkv.
            dims: D of keys and of values.
        """
        while len(self.layers) <= index:
            self.layers.append(PagedLayer())
        layer: PagedLayer = self.layers[index]
        if layer.key_buffer is None:
            self._allocate([layer], like, heads=heads, dims=dims)
        return layer

    def lay_out_as(self, other: PagedCache) -> None:
        """Make the layers that another cache of the model has; equal buffers lie side by side."""
        self.layers.extend(PagedLayer() for _ in other.layers)
        alike: dict[Hashable, list[int]] = {}
        for index, layer in enumerate(other.layers):
            if layer.shape is not None:
                alike.setdefault(layer.shape, []).append(index)
        for indices in alike.values():
            first = other.layers[indices[0]].key_buffer
            dims = first.shape[2], other.layers[indices[0]].value_buffer.shape[2]
            layers = [self.layers[index] for index in indices]
            self._allocate(layers, first, heads=first.shape[1], dims=dims)

    def _allocate(
        self, layers: list[PagedLayer], like: Tensor, *, heads: int, dims: tuple[int, int]
    ) -> None:
        count, slots = len(layers), self.slots + self.block_size
        if dims[0] == dims[1]:
            pool = like.new_empty(2 * count, slots, heads, dims[0])
            pools, keys, values = [pool], pool[:count], pool[count:]
        else:
            keys, values = (like.new_empty(count, slots, heads, dim) for dim in dims)
            pools = [keys, values]
        for layer, key_buffer, value_buffer in zip(layers, keys, values, strict=True):
            layer.key_buffer, layer.value_buffer = key_buffer, value_buffer
        self.mover.pools.extend(pools)

    def move(self, moves: list[Move]) -> None:
        """Copy blocks as planned, and empty the list: see `BlockMover.move`."""
        self.mover.move(moves)


class PagedPools:
    """The pool as fused layers see it: a pass's tokens go to the slots of its step.

    Args:
        cache: the pool.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache

    def begin(self) -> None:
        """Do nothing: each step says anew where its tokens go."""

    def open(self, index: int, hidden: Tensor, *, heads: int, dim: int) -> OpenPools | None:
        """See `FusedPools.open`; a layer without buffers gets them."""
        layer = self.cache.layer_for(index, hidden, heads=heads, dims=(dim, dim))
        keys, values = layer.key_buffer, layer.value_buffer
        assert keys is not None
        assert values is not None
        wanted = heads, dim
        if not layer.holds_attended_keys or keys.dtype != hidden.dtype:
            return None
        if keys.shape[1:] != wanted or values.shape[1:] != wanted:
            return None
        return OpenPools(keys, values, self.cache.step.slots)

    def advance(self, index: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the layer's pool, `[1, Hkv, slots, D]`: lengths are the step's affair."""
        layer: PagedLayer = self.cache.layers[index]
        return layer.pool_views(1)


def block_slots(blocks: list[int], block_size: int) -> Tensor:
    """Return the slots of `blocks` in order, `[len(blocks) * block_size]` int64."""
    first = torch.tensor(blocks, dtype=torch.int64).unsqueeze(-1) * block_size
    return (first + torch.arange(block_size)).flatten()


class RequestView:
    """One request's part of the pool, as what chooses keys expects a cache to be: one row.

    Args:
        cache: the pool.
        device: where it is.
        reads_keys: whether somebody looks at keys or values; if not, views are empty and free.
    """

    def __init__(self, cache: PagedCache, device: torch.device, *, reads_keys: bool) -> None:
        self.cache = cache
        self.reads_keys = reads_keys
        self.layers: list[RequestLayer] = []
        self.device = device
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)
        self.lengths = RowLengths([0], device)
        self._version = -1
        self._has_holes = False

    def place(self, table: BlockTable, *, holes: bool = False) -> Tensor:
        """Return the slots of the request's tokens in logical order, as the table has them now.

        With `holes`, -1 stands for those on the host; else they must all be here.
        """
        if table.version != self._version:
            blocks = [-1 if block is None else block for block in table.device]
            # A block of -1 has only negative slots.
            slots = block_slots(blocks, self.cache.block_size).clamp_min(-1)
            self.slots, self._version = slots.to(self.device), table.version
            self._has_holes = -1 in blocks
        if self._has_holes and not holes:
            table.resident()
        return self.slots

    def set_length(self, tokens: int) -> None:
        """Say how many tokens are committed; layers that were met meanwhile join."""
        self.lengths = RowLengths([tokens], self.device)
        self.meet_layers()

    def meet_layers(self) -> None:
        """Let layers that were met since the last time join."""
        while len(self.layers) < len(self.cache.layers):
            self.layers.append(RequestLayer(self, self.cache.layers[len(self.layers)]))


class RequestLayer:
    """One layer of a `RequestView`."""

    is_selectable = True

    def __init__(self, view: RequestView, layer: PagedLayer) -> None:
        self._view, self._layer = view, layer

    @property
    def window(self) -> int | None:
        """Positions that a query of the layer sees, or None."""
        return self._layer.window

    @property
    def key_buffer(self) -> Tensor | None:
        """The pool's, which says where it lies."""
        return self._layer.key_buffer

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self._layer.kv_heads

    @property
    def lengths(self) -> RowLengths | None:
        """The request's committed tokens; None where the layer holds nothing."""
        return None if self._layer.key_buffer is None else self._view.lengths

    def views(self) -> tuple[Tensor, Tensor]:
        """Return copies of the request's keys and values, `[1, Hkv, S, D]`."""
        end = self._view.lengths.max if self._view.reads_keys else 0
        return self._layer.read(self._view.slots[:end])


def check_layer(layer: Any, name: str) -> None:
    """Raise `UnsupportedModelError` if a layer attends to what is not in the pool."""
    if layer.attended_heads is not None:
        raise UnsupportedModelError(
            f"{name} makes the keys that it attends to of what it caches; the engine's pool holds "
            "keys: use model.generate(assistant=)"
        )
