"""`PillarCache`: the library's cache in the shape that Hugging Face models expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.errors import UnsupportedOptionError
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.cache import ContiguousCache, ContiguousLayer
from pillarattn.modules.step import StepState
from pillarattn.patch.compat import Cache, CacheLayerMixin, DynamicCache

# Set on the keys that a layer hands to the model, which passes them to its attention function: that
# is how the function finds its layer, also in models that use a module more than once per forward.
ORIGIN = "pillarattn_origin"


class PillarCacheLayer(ContiguousLayer, CacheLayerMixin):
    """A `ContiguousLayer` that answers the questions Hugging Face asks of a cache layer."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, *, limit: int | None = None) -> None:
        ContiguousLayer.__init__(self, limit=limit)

    @property
    def keys(self) -> Tensor | None:
        """Keys up to the longest row."""
        return None if self.lengths is None else self.views()[0]

    @property
    def values(self) -> Tensor | None:
        """Values up to the longest row."""
        return None if self.lengths is None else self.views()[1]

    @property
    def is_initialized(self) -> bool:
        """Whether the buffers exist."""
        return self.key_buffer is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `append` allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append and return views of everything."""
        return self.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the longest row."""
        return 0 if self.lengths is None else self.lengths.max

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that the next update returns, and their offset."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self) -> int:
        """Return -1: the layer grows."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest `-tokens_to_remove` tokens of every row (Hugging Face's sign)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a count <= 0 of tokens to drop, got {tokens_to_remove}")
        if self.lengths is not None and tokens_to_remove:
            self.roll_back(self.lengths.plus(tokens_to_remove))

    def reset(self) -> None:
        """Forget all tokens; the buffers stay."""
        if self.lengths is not None:
            self.lengths = RowLengths([0] * len(self.lengths.host), self.lengths.device)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows in the order of `beam_idx`."""
        self.take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self.lengths is not None:
            self.take_rows(torch.arange(len(self.lengths.host)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Refuse: the buffers stay where they are."""
        raise NotImplementedError("PillarCache does not offload; use a smaller batch or context")

    prefetch = offload


class PillarCache(ContiguousCache, Cache):
    """Preallocated Hugging Face cache with rows of their own lengths; rolls back in O(1).

    Keys and values are written in place and buffers double when a power of two is crossed, so that
    a step never copies the past. With rows of equal length it is a drop-in `cache=` /
    `past_key_values=` for any model with full or windowed attention.

    Args:
        limit: tokens a row will never exceed, if known; caps the doubling.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        Cache.__init__(self, layers=[])
        self.limit = limit
        self.step: StepState | None = None
        self.attention = PillarAttention()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer and return views that say where they come from."""
        while len(self.layers) <= layer_idx:
            self.layers.append(PillarCacheLayer(limit=self.limit))
        keys, values = self.layers[layer_idx].append(key_states, value_states)
        setattr(keys, ORIGIN, (self, layer_idx))
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest `-tokens_to_remove` tokens of every row."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)  # type: ignore[attr-defined]

    def import_from(self, other: Cache) -> None:
        """Copy the tokens of a `DynamicCache`; what a window has dropped there stays hidden here.

        Raises:
            UnsupportedOptionError: the cache is of a kind that cannot be read back exactly.
        """
        for index, layer in enumerate(other.layers):
            name = type(layer).__name__
            if name not in ("DynamicLayer", "DynamicSlidingWindowLayer"):
                raise UnsupportedOptionError(
                    f"a cache with {name} layers cannot be used with assistant=; "
                    "pass a DynamicCache or a PillarCache, or none"
                )
            total = int(layer.get_seq_length())
            if total == 0:
                continue
            hidden = total - layer.keys.shape[2]
            if hidden:
                batch, heads, _, dim = layer.keys.shape
                self.update(
                    layer.keys.new_zeros(batch, heads, hidden, dim),
                    layer.values.new_zeros(batch, heads, hidden, layer.values.shape[3]),
                    index,
                )
            self.update(layer.keys, layer.values, index)

    def export_to(self, other: DynamicCache) -> DynamicCache:
        """Hand the tokens to a `DynamicCache` as views, with rows of equal length; return it."""
        for index, layer in enumerate(self.layers):
            if layer.lengths is None:
                continue
            keys, values = layer.views()
            while len(other.layers) <= index:
                other.layers.append(other.layer_class_to_replicate())
            into = other.layers[index]
            into.lazy_initialization(keys, values)
            window = getattr(into, "sliding_window", None)
            if window is not None:
                into.cumulative_length = keys.shape[2]
                first = max(0, keys.shape[2] - window + 1)
                keys, values = keys[:, :, first:], values[:, :, first:]
            into.keys, into.values = keys, values
        return other
