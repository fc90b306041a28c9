"""How many sequences fit into a device's memory."""

from __future__ import annotations

from pillarattn.theory.hardware import Hardware
from pillarattn.theory.model_shape import ModelShape
from pillarattn.theory.traffic import INDEX_BYTES, SCORE_BYTES, selected_keys


def speculation_bytes(
    shape: ModelShape,
    length: int,
    *,
    k: int,
    s: float,
    min_budget: int = 128,
    sampling: bool = False,
) -> float:
    """Bytes of one sequence that only speculation needs, in bytes.

    The cache of k + 1 tokens that may be rolled back, pooled scores and index lists of the full
    layers, a copy of recurrent state, and while sampling the fp32 distributions of k drafts.
    """
    if k == 0:
        return 0.0
    tail = shape.cache_bytes(length + k + 1) - shape.cache_bytes(length)
    heads = sum(layer.kv_heads for layer in shape.layers if layer.kind == "full")
    lists = heads * selected_keys(length, s, min_budget) * INDEX_BYTES
    state = sum(layer.state for layer in shape.layers) * shape.state_bytes
    drafts = draft_distribution_bytes(shape.vocab, k) if sampling else 0
    return tail + heads * (length + k + 1) * SCORE_BYTES + lists + state + drafts


def draft_distribution_bytes(vocab: int, rows: int, value_bytes: int = 4) -> int:
    """Bytes of `rows` distributions over the vocabulary, kept until they are verified."""
    return rows * vocab * value_bytes


def draft_hidden_bytes(hidden: int, rows: int, value_bytes: int = 2) -> int:
    """Bytes of `rows` hidden states, from which distributions can be computed again."""
    return rows * hidden * value_bytes


def max_sequences(
    shape: ModelShape,
    hardware: Hardware,
    length: int,
    *,
    k: int = 0,
    s: float = 0.05,
    min_budget: int = 128,
    sampling: bool = False,
    reserve: float = 0.08,
) -> int:
    """Return how many sequences of `length` tokens fit beside the weights; 0 if none does.

    Args:
        shape: the model.
        hardware: the device.
        length: tokens of each sequence at its end.
        k, s, min_budget, sampling: the speculation; k = 0 is plain decoding.
        reserve: share of the memory kept for activations, graphs and fragmentation.
    """
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve must be within 0 <= reserve < 1, got {reserve}")
    extra = speculation_bytes(shape, length, k=k, s=s, min_budget=min_budget, sampling=sampling)
    free = hardware.memory * (1 - reserve) - shape.resident_bytes
    each = shape.cache_bytes(length) + extra
    return max(0, int(free // each)) if each else 0
