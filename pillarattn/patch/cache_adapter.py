"""`PillarCache`: the library's cache in the shape that Hugging Face models expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.errors import UnsupportedModelError, UnsupportedOptionError
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.cache import ContiguousCache
from pillarattn.modules.step import StepState
from pillarattn.patch.autocast import as_attended
from pillarattn.patch.cache_layers import PillarCacheLayer, layer_like
from pillarattn.patch.compat import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

# Set on the keys that a layer hands to the model, which passes them to its attention function: that
# is how the function finds its layer, also in models that use a module more than once per forward.
ORIGIN = "pillarattn_origin"
# Set on a cache while a generation uses it.
_HOLDER = "_holder"


class PillarCache(ContiguousCache, Cache):
    """Preallocated Hugging Face cache with rows of their own lengths; rolls back in O(1).

    Keys and values are written in place and buffers double when a power of two is crossed, so that
    a step never copies the past. With rows of equal length it is a drop-in `cache=` /
    `past_key_values=` for any model with full or windowed attention.

    Args:
        limit: tokens a row will never exceed, if known; caps the doubling.
        config: of the model; needed where some layers are recurrent.
    """

    def __init__(self, *, limit: int | None = None, config: Any = None) -> None:
        Cache.__init__(self, layers=[])
        self.limit = limit
        # For passes that must find the buffers where earlier ones did.
        self.allocates_at_once = False
        self.step: StepState | None = None
        self.attention = PillarAttention()
        # The layer that was written last, until its attention has asked for it.
        self.written: int | None = None
        # What fresh layers begin with, the same for all: lengths are counted on the device.
        self._begun: RowLengths | None = None
        if config is not None:
            self.fit(config)

    def fit(self, config: Any) -> None:
        """Make the layers that a model of this config needs; a cache that has some keeps them.

        Where all of them are alike they are made as they are written to: some models tell a fresh
        cache by its having no layers.

        Raises:
            UnsupportedModelError: the model keeps something that has no place here.
        """
        if self.layers:
            return
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        made = []
        for index, layer in enumerate(layers):
            own = layer_like(layer, limit=self.limit)
            if own is None:
                raise UnsupportedModelError(
                    f"layer {index} caches what a {type(layer).__name__} holds, which cannot be "
                    "kept in place"
                )
            made.append(own)
        if any(type(layer) is not PillarCacheLayer for layer in made):
            self.layers.extend(made)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the cache for one generation.

        Raises:
            UnsupportedOptionError: another one holds it.
        """
        mine = object()
        # A single step of the interpreter, so that two threads cannot both find it free.
        if self.__dict__.setdefault(_HOLDER, mine) is not mine:
            raise UnsupportedOptionError(
                "this PillarCache is in use by another generation that has not ended; give each "
                "generation and each thread a PillarCache of its own"
            )
        try:
            yield
        finally:
            self.__dict__.pop(_HOLDER, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to nobody yet.
        return {name: value for name, value in self.__dict__.items() if name != _HOLDER}

    @property
    def state_layers(self) -> list[Any]:
        """Layers with recurrent or convolution states."""
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer and return views that say where they come from."""
        while len(self.layers) <= layer_idx:
            self.layers.append(PillarCacheLayer(limit=self.limit))
        layer = self.layers[layer_idx]
        layer.at_once = self.allocates_at_once
        if layer.lengths is None:
            layer.lengths = self._beginning(key_states)
        keys, values = layer.append(*as_attended(key_states, value_states))
        setattr(keys, ORIGIN, (self, layer_idx))
        self.written = layer_idx
        return keys, values

    def _beginning(self, keys: Tensor) -> RowLengths:
        """Return the lengths of a layer that holds nothing yet."""
        batch, device, begun = keys.shape[0], keys.device, self._begun
        if begun is None or len(begun.host) != batch or begun.device != device:
            begun = self._begun = RowLengths([0] * batch, device)
        return begun

    @property
    def lengths(self) -> RowLengths:
        """The rows' lengths, the same in every layer."""
        for layer in self.layers:
            if layer.lengths is not None:
                return layer.lengths
        raise ValueError("the cache is empty; run a forward pass first")

    def roll_back(self, lengths: RowLengths) -> None:
        """Set every layer's row lengths to `lengths`, none longer than now."""
        shorter: RowLengths | None = None
        layer: Any
        for layer in self.layers:
            if shorter is not None and layer.lengths is shorter and layer.holds_nothing_gathered:
                # What an earlier layer was found to allow.
                layer.lengths = lengths
                continue
            before = layer.lengths
            layer.roll_back(lengths)
            shorter = before

    def begin_anew(self) -> None:
        """Forget all tokens as if there had never been any; the buffers stay where they are."""
        self._begun = None
        for layer in self.layers:
            layer.lengths = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest `-tokens_to_remove` tokens of every row."""
        for layer in self.layers:
            layer.crop(tokens_to_remove)  # type: ignore[attr-defined]

    def import_from(self, other: Cache) -> None:
        """Copy what a `DynamicCache` holds; what a window has dropped there stays hidden here.

        Raises:
            UnsupportedOptionError: the cache is of a kind that cannot be read back exactly.
        """
        for index, layer in enumerate(other.layers):
            if layer_like(layer, limit=None) is None:
                raise UnsupportedOptionError(
                    f"a cache with {type(layer).__name__} layers cannot be used with assistant=; "
                    "pass a DynamicCache or a PillarCache, or none"
                )
            if isinstance(layer, LinearAttentionLayer) and index < len(self.layers):
                _copy_states(layer, self.layers[index])
            total = int(layer.get_seq_length()) if isinstance(layer, CacheLayerMixin) else 0
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
        """Hand everything to a `DynamicCache`, keys as views, rows of equal length; return it."""
        for index, layer in enumerate(self.layers):
            while len(other.layers) <= index:
                other.layers.append(other.layer_class_to_replicate())
            into = other.layers[index]
            if isinstance(layer, LinearAttentionLayer):
                _copy_states(layer, into)
            if layer.lengths is None:
                continue
            keys, values = layer.views()
            into.lazy_initialization(keys, values)
            window = getattr(into, "sliding_window", None)
            if window is not None:
                into.cumulative_length = keys.shape[2]
                first = max(0, keys.shape[2] - window + 1)
                keys, values = keys[:, :, first:], values[:, :, first:]
            into.keys, into.values = keys, values
        return other


# What a recurrent layer knows besides its keys.
_STATE_FIELDS = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
    "device",
    "dtype",
)


def _copy_states(source: Any, into: Any) -> None:
    for name in _STATE_FIELDS:
        value = getattr(source, name, None)
        if isinstance(value, dict):
            value = {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()}
        setattr(into, name, value)
