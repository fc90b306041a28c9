"""Which layers of a model drafts can read sparsely, going by its config."""

from __future__ import annotations

from typing import Any

from pillarattn.modules.cache import ContiguousLayer
from pillarattn.patch.cache_layers import layer_like
from pillarattn.patch.compat import DynamicCache


def sparse_layer_count(config: Any) -> int | None:
    """Return in how many layers drafts read selected keys, or None if the config does not tell.

    As the selector has it: layers that cache keys without a window, or all that have a window where
    every one has; recurrent layers, layers that read the keys of others, and layers whose chunks
    already bound what they read are not among them.
    """
    text = config.get_text_config(decoder=True)
    try:
        layers = DynamicCache(config=text).layers
    except Exception:
        # Each family's config fails in its own way where a field has an unusual form.
        return None
    kinds = list(getattr(text, "layer_types", None) or [])
    unbounded = windowed = 0
    for index, layer in enumerate(layers):
        if not isinstance(layer_like(layer, limit=None), ContiguousLayer):
            continue
        if not getattr(layer, "is_sliding", False):
            unbounded += 1
        elif kinds[index : index + 1] != ["chunked_attention"]:
            windowed += 1
    return unbounded or windowed
