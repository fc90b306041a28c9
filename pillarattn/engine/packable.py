"""Which models' requests can share a packed pass."""

from __future__ import annotations

import inspect

from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import LinearAttentionLayer, PreTrainedModel
from pillarattn.patch.record import PatchRecord
from pillarattn.patch.support import field, rope_types
from pillarattn.patch.tensor_parallel import ranks_of


def refusal(model: PreTrainedModel, record: PatchRecord) -> str | None:
    """Return why requests of `model` cannot share a packed pass, or None."""
    if ranks_of(model) is not None:
        # Each rank would plan, draw and stop by itself, and wait for the others where they differ.
        return "a tensor-parallel plan spreads it over processes, which the engine does not align"
    if record.dense_reason is not None:
        return f"sparse attention cannot act in it ({record.dense_reason})"
    if record.lockstep:
        return "it counts positions by itself, the same for all rows"
    if record.stores_latents:
        return "it caches latents, and the pool holds keys"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no position_ids"
    layers = PillarCache(config=model.config).layers
    if any(isinstance(layer, LinearAttentionLayer) for layer in layers):
        return "some of its layers keep recurrent states, which cannot be packed"
    if field(model.config.get_text_config(decoder=True), "attention_chunk_size"):
        return "it attends in chunks"
    moving = rope_types(model.config) & {"dynamic", "longrope"}
    if moving:
        return f"its rotary embedding ({moving.pop()}) depends on the longest request of a pass"
    return None
