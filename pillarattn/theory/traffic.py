"""Bytes moved and FLOPs done by each phase of a round, for any `ModelShape`.

Counted: weights, cache reads and writes, index lists, scores and their selection, recurrent state.
Not counted: activations, which stay in on-chip caches while decoding, and the logits.

A phase starts when every sequence holds `length` cached tokens, and feeds `rows` new ones of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from pillarattn.theory.model_shape import LayerShape, ModelShape

INDEX_BYTES = 4
SCORE_BYTES = 2
# Two 8-bit radix passes and one compaction.
SELECT_READS = 3
SCORE_MODES = ("none", "pooled", "rows", "reread")


@dataclass(frozen=True)
class Traffic:
    """Bytes and FLOPs of one phase, over the whole batch; `+` and `*` work field by field.

    Attributes:
        weights: weight bytes read.
        kv_read: cache bytes read in order.
        kv_gathered: cache bytes read through index lists.
        kv_written: cache bytes written.
        indices: bytes of index lists, read or written.
        scores: bytes of scores: written by verification, read by the selection.
        state: bytes of recurrent state, read and written.
        gemm_flops, attention_flops: FLOPs with weights, and with the cache.
    """

    weights: float = 0.0
    kv_read: float = 0.0
    kv_gathered: float = 0.0
    kv_written: float = 0.0
    indices: float = 0.0
    scores: float = 0.0
    state: float = 0.0
    gemm_flops: float = 0.0
    attention_flops: float = 0.0

    @property
    def kv_bytes(self) -> float:
        """Cache bytes read, in order and gathered."""
        return self.kv_read + self.kv_gathered

    @property
    def bytes(self) -> float:
        """All bytes."""
        cache = self.kv_bytes + self.kv_written + self.indices
        return self.weights + cache + self.scores + self.state

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.gemm_flops + self.attention_flops

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(*(getattr(self, f.name) * factor for f in fields(self)))


def selected_keys(length: int, s: float, min_budget: int = 128) -> int:
    """Return the budget N = min(length, max(min_budget, ceil(s * length))), in tokens.

    The same rule as `RatioBudget`; reference: arXiv 2512.01278.
    """
    if not 0 < s <= 1:
        raise ValueError(f"s must be within 0 < s <= 1, got {s}")
    return min(length, max(min_budget, math.ceil(round(s * length, 9))))


def gemm_traffic(shape: ModelShape, rows: float, logit_rows: float) -> Traffic:
    """Weights and matrix products of one pass over `rows` tokens, logits for `logit_rows`."""
    return Traffic(
        weights=shape.weights.streamed(rows, logit_rows) * shape.weight_bytes,
        gemm_flops=shape.weights.flops(rows, logit_rows),
    )


def full_attention_traffic(
    shape: ModelShape,
    batch: float,
    length: int,
    rows: int,
    *,
    scores: str = "none",
    selection_bytes: float = 0.0,
) -> Traffic:
    """Cache traffic of one pass of `rows` causal rows a sequence, every layer at full attention.

    `scores` says how the keys of the full layers are scored: "none"; "pooled", one value a key and
    KV head from the attention kernel itself; "rows", one value for each query row and head, pooled
    by a second kernel; "reread", a second pass over the keys (the paper's code). All but "none"
    also count what the Top-K selection reads, and `selection_bytes` a key and KV head on top: what
    a strategy reads and writes beside the pooled score (`Strategy.selection_bytes`).
    """
    if scores not in SCORE_MODES:
        raise ValueError(f"scores must be one of {', '.join(SCORE_MODES)}, got {scores!r}")
    total = Traffic()
    for layer, count in shape.groups:
        attention = _full_layer(shape, layer, length, rows)
        if scores != "none" and layer.kind == "full":
            attention = attention + _score_layer(shape, layer, length + rows, rows, scores)
            own = layer.kv_heads * (length + rows) * selection_bytes
            attention = attention + Traffic(scores=own)
        total = total + attention * (count * batch)
    return total


def draft_attention_traffic(
    shape: ModelShape, batch: float, length: int, *, selected: int, step: int
) -> Traffic:
    """Cache traffic of draft step `step` (1-based): one row a sequence.

    Full layers gather `selected` keys and everything written since they were selected, which is
    `step` tokens with the step's own. Other layers work as they always do.
    """
    total = Traffic()
    for layer, count in shape.groups:
        if layer.kind != "full":
            part = _full_layer(shape, layer, length + step - 1, 1)
        else:
            keys, cached = min(selected, length) + step, length + step
            part = Traffic(
                kv_read=layer.scanned * cached * shape.kv_bytes,
                kv_gathered=layer.read * keys * shape.kv_bytes,
                kv_written=_written(layer, cached, 1) * shape.kv_bytes,
                indices=INDEX_BYTES * layer.kv_heads * min(selected, length),
                state=2 * layer.state * shape.state_bytes,
                attention_flops=float(layer.attend_flops * keys + layer.expand_flops * cached),
            )
        total = total + part * (count * batch)
    return total


def plain_step(shape: ModelShape, batch: float, length: int) -> Traffic:
    """One step of plain decoding: one row a sequence, full attention."""
    return gemm_traffic(shape, batch, batch) + full_attention_traffic(shape, batch, length, 1)


def draft_step(
    shape: ModelShape, batch: float, length: int, *, s: float, min_budget: int = 128, step: int = 1
) -> Traffic:
    """Draft step `step` (1-based) of a round that began at `length` cached tokens."""
    selected = selected_keys(length, s, min_budget)
    attention = draft_attention_traffic(shape, batch, length, selected=selected, step=step)
    return gemm_traffic(shape, batch, batch) + attention


def verify_pass(
    shape: ModelShape,
    batch: float,
    length: int,
    *,
    k: int,
    scores: str = "pooled",
    selection_bytes: float = 0.0,
) -> Traffic:
    """One pass of k + 1 rows a sequence at full attention, with scores for the next selection."""
    rows = k + 1
    attention = full_attention_traffic(
        shape, batch, length, rows, scores=scores, selection_bytes=selection_bytes
    )
    return gemm_traffic(shape, batch * rows, batch * rows) + attention


def replay_pass(shape: ModelShape, batch: float, length: int, *, rows: float) -> Traffic:
    """What rolling back a recurrent state costs: a copy of it, and the accepted rows once more.

    Zero for models without a state, whose cache is simply cut.
    """
    if not shape.has_state:
        return Traffic()
    state = sum(layer.state for layer in shape.layers) * shape.state_bytes
    again = full_attention_traffic(shape, batch, length, max(1, round(rows)))
    return gemm_traffic(shape, batch * rows, 0) + again + Traffic(state=2 * state * batch)


def prefill(shape: ModelShape, batch: float, length: int) -> Traffic:
    """The prompt pass over `length` tokens a sequence; logits for the last one only.

    Each key counts as read once: what a tiled kernel reads again comes from on-chip caches.
    """
    attention = full_attention_traffic(shape, batch, 0, length)
    return gemm_traffic(shape, batch * length, batch) + attention


def _full_layer(shape: ModelShape, layer: LayerShape, length: int, rows: int) -> Traffic:
    cached = length + rows
    kept = min(cached, layer.window + rows - 1) if layer.window else cached
    scanned = layer.scanned * kept
    flops = layer.attend_flops * layer.pairs(length, rows) + layer.expand_flops * kept
    flops += layer.scan_flops * rows * kept
    return Traffic(
        kv_read=(layer.read * layer.keys_read(length, rows) + scanned) * shape.kv_bytes,
        kv_written=_written(layer, kept, rows) * shape.kv_bytes,
        state=2 * layer.state * shape.state_bytes,
        attention_flops=float(flops),
    )


def _written(layer: LayerShape, cached: int, rows: int) -> int:
    """Values written: the new tokens, and for expanded latents every cached token anew."""
    return (0 if layer.shared else layer.stored * rows) + layer.expanded * cached


def _score_layer(shape: ModelShape, layer: LayerShape, keys: int, rows: int, mode: str) -> Traffic:
    pooled = layer.kv_heads * keys * SCORE_BYTES * (1 + SELECT_READS)
    extra = 0.0
    if mode == "rows":
        extra = 2.0 * SCORE_BYTES * layer.query_heads * rows * keys
    elif mode == "reread":
        extra = layer.key_values * keys * shape.kv_bytes
    return Traffic(scores=pooled + extra)
