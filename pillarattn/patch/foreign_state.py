"""What a model remembers from pass to pass, wherever it keeps it, and how to put it back."""

from __future__ import annotations

import copy
from typing import Any

from pillarattn.errors import UnsupportedModelError
from pillarattn.patch.compat import Cache, DynamicCache, PreTrainedModel, cache_keyword
from pillarattn.patch.snapshot import Snapshot

# Names under which outputs carry a state that is no Cache, and their whole size does not grow.
_STATE_NAMES = ("state", "cache_params")
# The same, of kinds that cannot be put back.
_OTHER_NAMES = ("past_key_values", "mems", "past_buckets_states")


class ForeignState:
    """The state after the committed tokens, of a model that keeps it in a way of its own.

    Args:
        model: the model.
        outputs: of its prompt pass.

    Raises:
        UnsupportedModelError: the state is kept where it cannot be put back.
    """

    def __init__(self, model: PreTrainedModel, outputs: Any) -> None:
        self.outputs = outputs
        self._is_stateful = getattr(model, "_is_stateful", False)
        cache = outputs.get(cache_keyword())
        self.cache: Any = cache if isinstance(cache, Cache) and hasattr(cache, "layers") else None
        # Some outputs answer to an older name with the cache itself.
        others = {name: outputs.get(name) for name in _STATE_NAMES}
        self._names = [n for n, k in others.items() if k is not None and k is not self.cache]
        elsewhere = [name for name in (cache_keyword(), *_OTHER_NAMES) if outputs.get(name)]
        # With nothing returned, plain decoding runs the whole text at every token.
        self.is_empty = not (self.cache or self._names or elsewhere or self._is_stateful)
        if self.cache is None and not self._names and not self.is_empty:
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps its state in no transformers Cache; it cannot be "
                "rolled back, so use the model without assistant="
            )
        self._snapshot: Snapshot | None = None
        self._kept: tuple[Any, dict[str, Any]] | None = None

    @property
    def can_crop(self) -> bool:
        """Whether the newest tokens can be cut off, and nothing else remembers them."""
        return self.is_empty or (
            type(self.cache) is DynamicCache
            and not self._is_stateful
            and not self._names
            and all(type(layer).__name__ == "DynamicLayer" for layer in self.cache.layers)
        )

    def crop(self, tokens: int) -> None:
        """Cut the newest `tokens` off."""
        if self.cache is not None:
            self.cache.crop(-tokens)

    def save(self) -> None:
        """Remember the state; until `commit`, later calls change nothing."""
        if self._kept is not None:
            return
        self._kept = self.outputs, self._copied()
        if self.cache is not None:
            self._snapshot = Snapshot([self.cache, *self.cache.layers])

    def restore(self) -> None:
        """Put back what `save` remembered, as often as wanted."""
        if self._kept is None:
            return
        self.outputs, states = self._kept
        for name, value in states.items():
            self.outputs[name] = copy.deepcopy(value)
        if self._snapshot is not None:
            self._snapshot.restore()

    def commit(self) -> None:
        """Take the state as it is now."""
        self._kept = self._snapshot = None

    def _copied(self) -> dict[str, Any]:
        return {name: copy.deepcopy(self.outputs[name]) for name in self._names}
