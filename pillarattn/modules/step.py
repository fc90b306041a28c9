"""The state of one forward pass: its phase, and what attention reads or leaves behind in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from pillarattn.datatypes import Phase, RowLengths, Selection
from pillarattn.modules.score_buffer import ScoreBuffer


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of its attention besides queries, keys and values.

    Attributes:
        scale: factor on the logits; None is D ** -0.5.
        window: positions that a query sees, its own included; None is all.
        softcap: logits become softcap * tanh(logits / softcap); None is no cap.
        sinks: `[Hq]` logits that take a share of the softmax without a value, or None.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class SeedQueries:
    """The prompt's last query rows of one layer, `[B, Hq, R, D]`, kept to score its keys later."""

    query: Tensor
    options: AttentionOptions


@dataclass
class StepState:
    """Travels with the cache through one forward pass.

    Attributes:
        phase: what the pass is for.
        selections: keys to read in a draft, by layer; a layer that is absent reads all it sees.
        refresh: chooses a layer's keys from the draft query itself, for strategies that do so:
            `(layer_index, query, keys, lengths, options) -> Selection`.
        scores: where a verify pass puts its row scores; None scores nothing.
        scored_layers: layers that a verify pass scores.
        row_limit: see `kernels.verify_attention`.
        seeds: where a prefill puts its last query rows, by layer.
        seed_rows: how many rows that is; 0 keeps none.
        visited: layers whose attention ran; the caller compares it with what it expects.
    """

    phase: Phase
    selections: dict[int, Selection] = field(default_factory=dict)
    refresh: Callable[[int, Tensor, Tensor, RowLengths, AttentionOptions], Selection] | None = None
    scores: ScoreBuffer | None = None
    scored_layers: frozenset[int] = frozenset()
    row_limit: int | None = None
    seeds: dict[int, SeedQueries] = field(default_factory=dict)
    seed_rows: int = 0
    visited: list[int] = field(default_factory=list)
