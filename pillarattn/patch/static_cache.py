"""Static caches of transformers, read into a `PillarCache` before a run and filled after it.

A static cache has no room for drafts past its end, and masks that span all of it. The run itself
therefore works in a `PillarCache`; what it leaves is what plain decoding would have left.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.cache_adapter import PillarCache


def import_static(cache: PillarCache, static: StaticCache, *, rows: int, needed: int) -> None:
    """Copy what a static cache holds into an empty `cache`.

    Args:
        cache: empty.
        static: the caller's, or one that `generate` has just made.
        rows: of the batch.
        needed: tokens a row that will be cached at the end of the run.

    Raises:
        UnsupportedOptionError: it has layers of another kind, or no room for `rows` or `needed`.
    """
    for index, layer in enumerate(static.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise UnsupportedOptionError(
                f"a static cache with {type(layer).__name__} layers cannot be used with "
                "assistant=; pass a DynamicCache or a PillarCache, or none"
            )
        if type(layer) is StaticLayer and layer.max_cache_len < needed:
            raise UnsupportedOptionError(
                f"the StaticCache has room for {layer.max_cache_len} tokens and this generation "
                f"may need {needed}; pass max_cache_len={needed} or more, or lower max_new_tokens"
            )
        if layer.is_initialized and layer.keys.shape[0] != rows:
            raise UnsupportedOptionError(
                f"the StaticCache holds {layer.keys.shape[0]} rows and the batch has {rows}; "
                "use one cache per batch"
            )
        total = int(layer.get_seq_length())
        if total == 0:
            continue
        held = min(total, layer.max_cache_len)
        keys, values = layer.keys[:, :, :held], layer.values[:, :, :held]
        if total > held:
            # What the window has dropped stays hidden, but counts as a position.
            lost = total - held
            cache.update(
                keys.new_zeros(*keys.shape[:2], lost, keys.shape[3]),
                values.new_zeros(*values.shape[:2], lost, values.shape[3]),
                index,
            )
        cache.update(keys, values, index)


def tokens_cached(
    input_ids: Tensor, *, past: int, generation_config: Any, kwargs: dict[str, Any]
) -> int:
    """Return the tokens a row that a run may leave in the cache, which held `past` before it.

    As `generate` sees it: ids as long as the mask are the whole text, shorter ones its new end.
    """
    mask, embeddings = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
    length = input_ids.shape[1]
    new = int(generation_config.max_length) - length
    if embeddings is not None:
        return int(embeddings.shape[1]) + new - 1
    whole = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    return length + new - 1 + (0 if whole == length else past)


def export_static(cache: PillarCache, static: StaticCache) -> StaticCache:
    """Write all tokens of `cache`, whose rows are equally long, into a static cache; return it."""
    for index, source in enumerate(cache.layers):
        if source.lengths is None:
            continue
        into: Any = static.layers[index]
        keys, values = source.views()
        if not into.is_initialized:
            into.lazy_initialization(keys, values)
        total = keys.shape[2]
        held = min(total, into.max_cache_len)
        into.keys[:, :, :held].copy_(keys[:, :, total - held :])
        into.values[:, :, :held].copy_(values[:, :, total - held :])
        # In place: compiled code knows the address.
        into.cumulative_length.fill_(held)
        if isinstance(into, StaticSlidingWindowLayer):
            into.cumulative_length_int = total
    return static
