"""What a decoder costs to run: its weights, its cache and its layers, as plain numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class LayerShape:
    """One layer's cache and attention, per sequence.

    Attributes:
        kind: "full" (sees every key; drafts read a share of them), "window" (sees the newest
            `window` keys), "indexed" (chooses `read_limit` keys by itself), or "none".
        query_heads, kv_heads: heads that attend, and lists of keys that a draft step reads.
        stored: values that one token keeps in the cache.
        read: values that are read for one attended token.
        scanned: values that every pass reads for every cached token, selected or not.
        expanded: values that every pass writes anew for every cached token.
        key_values: how many of the `read` values are keys; what a second pass for scores reads.
        attend_flops: FLOPs of one query row and one attended key, all heads.
        scan_flops: FLOPs of one query row and one scanned key.
        expand_flops: FLOPs of expanding one cached token.
        window: newest tokens that are kept and seen, in tokens; None is no bound.
        read_limit: most keys that one row attends, in tokens; None is no bound. Neighbouring rows
            are taken to choose almost the same keys.
        state: values of recurrent and convolution state, whatever the length.
        shared: the layer reads another layer's cache and stores nothing.
    """

    kind: str
    query_heads: int = 0
    kv_heads: int = 0
    stored: int = 0
    read: int = 0
    scanned: int = 0
    expanded: int = 0
    key_values: int = 0
    attend_flops: int = 0
    scan_flops: int = 0
    expand_flops: int = 0
    window: int | None = None
    read_limit: int | None = None
    state: int = 0
    shared: bool = False

    def keys_read(self, length: int, rows: int) -> int:
        """Keys of the cache that `rows` new rows read together, after `length` earlier tokens."""
        keys = length + rows
        for bound in (self.window, self.read_limit):
            if bound is not None:
                keys = min(keys, bound + rows - 1)
        return keys

    def pairs(self, length: int, rows: int) -> int:
        """Query-key pairs of `rows` causal rows after `length` earlier tokens."""
        bounds = [bound for bound in (self.window, self.read_limit) if bound is not None]
        return causal_pairs(length, rows, min(bounds) if bounds else None)


def causal_pairs(length: int, rows: int, bound: int | None = None) -> int:
    """Sum over j = 1..rows of min(bound, length + j): what causal rows attend to, in pairs."""
    if bound is None:
        return rows * length + rows * (rows + 1) // 2
    free = min(max(bound - length, 0), rows)
    return free * length + free * (free + 1) // 2 + (rows - free) * bound


@dataclass(frozen=True)
class Weights:
    """Parameters by how often a forward pass reads them; counts, not bytes.

    Attributes:
        dense: read by every pass: attention, MLPs, routers, shared experts, all layers.
        head: the output projection, read by every pass that needs logits.
        idle: kept in memory but not read by decoding: input embeddings that are not tied to the
            head (a lookup reads one row a token), and towers of other modalities.
        expert: one expert of one layer.
        moe_layers, experts, active: layers with experts, experts in each, experts a token uses.
    """

    dense: int
    head: int
    idle: int = 0
    expert: int = 0
    moe_layers: int = 0
    experts: int = 0
    active: int = 0

    @property
    def total(self) -> int:
        """Every parameter in memory."""
        return self.dense + self.head + self.idle + self.moe_layers * self.experts * self.expert

    @property
    def active_per_token(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.dense + self.head + self.moe_layers * self.active * self.expert

    def experts_read(self, rows: float) -> float:
        """Distinct experts a layer reads for `rows` tokens, if the router spreads them evenly.

        A token uses `active` different experts, so it misses one expert with chance
        1 - active / experts; tokens are taken as independent. Real routers are less even and read
        fewer.
        """
        if not self.experts or rows <= 0:
            return 0.0
        missed: float = (1 - self.active / self.experts) ** rows
        return self.experts * (1 - missed)

    def streamed(self, rows: float, logit_rows: float) -> float:
        """Parameters that one pass over `rows` tokens reads."""
        head = self.head if logit_rows else 0
        return self.dense + head + self.moe_layers * self.expert * self.experts_read(rows)

    def flops(self, rows: float, logit_rows: float) -> float:
        """FLOPs of all matrix products over `rows` tokens, logits for `logit_rows` of them."""
        per_row = self.dense + self.moe_layers * self.active * self.expert
        return 2.0 * (per_row * rows + self.head * logit_rows)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model as the planner sees it.

    Build it with `shape_from_config` or `shape_from_model`.

    Attributes:
        name: for people.
        hidden, vocab: width of the residual stream, tokens of the vocabulary.
        layers: one `LayerShape` a layer.
        weights: parameter counts.
        weight_bytes, kv_bytes, state_bytes: bytes of one parameter, cached value and state value;
            `weight_bytes` may be a fraction (0.5 for 4 bits).
        notes: what the numbers leave out, one sentence each.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    weights: Weights
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    state_bytes: float = 4.0
    notes: tuple[str, ...] = ()

    @cached_property
    def groups(self) -> tuple[tuple[LayerShape, int], ...]:
        """Different layers and how many there are of each."""
        return tuple(Counter(self.layers).items())

    @property
    def full_layers(self) -> int:
        """Layers that drafts can make sparse."""
        return sum(layer.kind == "full" for layer in self.layers)

    @property
    def has_state(self) -> bool:
        """Whether some layer keeps a recurrent state, which only a replay can roll back."""
        return any(layer.state for layer in self.layers)

    @property
    def resident_bytes(self) -> float:
        """Weights in memory, in bytes."""
        return self.weights.total * self.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Cache of one token in the layers without a window, in bytes."""
        kept = (layer for layer in self.layers if layer.window is None and not layer.shared)
        return sum(layer.stored for layer in kept) * self.kv_bytes

    def cache_bytes(self, length: int) -> float:
        """Cache and state of one sequence of `length` tokens, in bytes."""
        values = 0
        for layer, count in self.groups:
            if not layer.shared:
                values += count * layer.stored * min(length, layer.window or length)
        state = sum(layer.state for layer in self.layers)
        return values * self.kv_bytes + state * self.state_bytes

    def with_bytes(
        self, *, weight_bytes: float | None = None, kv_bytes: float | None = None
    ) -> ModelShape:
        """Return the same model at other widths of weights and cache, in bytes a value."""
        return replace(
            self,
            weight_bytes=self.weight_bytes if weight_bytes is None else weight_bytes,
            kv_bytes=self.kv_bytes if kv_bytes is None else kv_bytes,
        )
