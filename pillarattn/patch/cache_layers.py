"""The layers of a `PillarCache`, one kind for each kind of layer that models have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.modules.cache import ContiguousLayer
from pillarattn.patch.compat import (
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionLayer,
)


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
    def holds_nothing_gathered(self) -> bool:
        """Whether lengths are all that a roll back changes."""
        return self._kept is None

    @property
    def is_initialized(self) -> bool:
        """Whether tokens were ever written: a cache that begins anew may have its buffers yet."""
        return self.lengths is not None

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


class _Keyless:
    """Stands where a layer has no keys: what caches do to keys passes it by."""

    window: int | None = None
    lengths: RowLengths | None = None
    is_selectable = False

    def roll_back(self, lengths: RowLengths) -> None:
        """Do nothing: states are rolled back by snapshot."""

    def rearrange(self, source: Tensor, lengths: RowLengths) -> None:
        """Do nothing: states do not know positions."""


class StateLayer(_Keyless, LinearAttentionLayer):
    """Recurrent and convolution states of a layer without keys."""


class EmptyLayer(_Keyless, DummyLayer):
    """A layer that keeps nothing: experts alone, or the keys of another layer."""


class StateAndKeysLayer(LinearAttentionLayer, PillarCacheLayer):
    """A layer with both: attention and a recurrence side by side."""

    is_compileable = False
    is_croppable = False

    def __init__(self, *, limit: int | None = None, number_of_states: int = 1) -> None:
        PillarCacheLayer.__init__(self, limit=limit)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate states; keys allocate themselves."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget states and tokens."""
        LinearAttentionLayer.reset(self)
        PillarCacheLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows in the order of `beam_idx`."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        PillarCacheLayer.reorder_cache(self, beam_idx)

    def get_max_length(self) -> int:
        """Return -1: the layer grows."""
        return -1


def layer_like(layer: Any, *, limit: int | None) -> Any:
    """Return an empty layer of ours for one of a `DynamicCache`; None where there is none."""
    name = type(layer).__name__
    if name in ("DynamicLayer", "DynamicSlidingWindowLayer"):
        return PillarCacheLayer(limit=limit)
    if name == "LinearAttentionLayer":
        return StateLayer(number_of_states=layer.number_of_states)
    if name in (
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    ):
        return StateAndKeysLayer(limit=limit, number_of_states=layer.number_of_states)
    if isinstance(layer, DummyLayer):
        return EmptyLayer()
    return None
