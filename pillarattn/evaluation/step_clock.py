"""Seconds of one step of the engine by the roofline: the clock of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from pillarattn.engine.step_plan import StepPlan
from pillarattn.theory.capacity import speculation_bytes
from pillarattn.theory.hardware import Hardware
from pillarattn.theory.links import Link
from pillarattn.theory.model_shape import LayerShape, ModelShape
from pillarattn.theory.parallel import ACTIVATION_BYTES, SUMS_A_LAYER, shard
from pillarattn.theory.roofline import IDEAL, Efficiency, roofline_seconds
from pillarattn.theory.traffic import (
    INDEX_BYTES,
    SCORE_BYTES,
    SELECT_READS,
    Traffic,
    gemm_traffic,
    selected_keys,
)

# A budget holds for all drafts of a round.
_budget = lru_cache(maxsize=65536)(selected_keys)
# Length at which memory that only speculation needs is counted, in tokens.
_TYPICAL_LENGTH = 4096


@dataclass(frozen=True)
class StepClock:
    """The time of a `StepPlan` whose requests have lengths of their own, on tensor-parallel ranks.

    Attributes:
        shape: the whole model; all its layers at full attention over whole KV heads.
        hardware, efficiency: of each rank.
        ranks, link: devices that hold the model together, and what is between them.
        k, s, min_budget: the speculation; k = 0 is plain decoding.

    Raises:
        ValueError: a layer has a window, a state or latents, or heads do not divide by the ranks.
    """

    shape: ModelShape
    hardware: Hardware
    link: Link
    efficiency: Efficiency = IDEAL
    ranks: int = 1
    k: int = 8
    s: float = 0.05
    min_budget: int = 128
    local: ModelShape = field(init=False)
    layer: LayerShape = field(init=False)

    def __post_init__(self) -> None:
        kinds = self.shape.groups
        if len(kinds) != 1 or kinds[0][0].kind != "full" or kinds[0][0].scanned:
            raise ValueError(
                f"a step of {self.shape.name} cannot be timed: its layers must all be alike, with "
                "full attention over whole KV heads"
            )
        object.__setattr__(self, "local", shard(self.shape, self.ranks))
        object.__setattr__(self, "layer", self.local.layers[0])

    def pool_tokens(self, reserve: float = 0.08) -> int:
        """Return the tokens of a cache beside the weights; `reserve` is kept for activations."""
        free = self.hardware.memory * (1 - reserve) - self.local.resident_bytes
        extra = speculation_bytes(
            self.local, _TYPICAL_LENGTH, k=self.k, s=self.s, min_budget=self.min_budget
        )
        each = self.local.kv_bytes_per_token + extra / _TYPICAL_LENGTH
        return max(0, int(free / each))

    def traffic(
        self, plan: StepPlan, cached: Mapping[str, int], drafted: Mapping[str, int]
    ) -> Traffic:
        """Return what one rank moves and computes in a step.

        Args:
            plan: the step.
            cached: tokens in the cache of each decoding request, its drafts not counted.
            drafted: drafts that each of them has before the step.
        """
        gathered = listed = read = scored = written = 0
        pairs = 0
        for name in plan.drafts:
            budget = _budget(cached[name], self.s, self.min_budget)
            keys = budget + drafted[name] + 1
            gathered, listed, pairs = gathered + keys, listed + budget, pairs + keys
        for name, rows in plan.verifies:
            length = cached[name]
            read += length + rows
            scored += length + rows if self.k else 0
            pairs += rows * length + rows * (rows + 1) // 2
            written += rows
        for chunk in plan.prefills:
            read += chunk.start + chunk.tokens
            pairs += chunk.tokens * chunk.start + chunk.tokens * (chunk.tokens + 1) // 2
            written += chunk.tokens
        layer, count = self.layer, len(self.local.layers)
        kv = self.local.kv_bytes * count
        return gemm_traffic(self.local, *_rows(plan)) + Traffic(
            kv_read=layer.read * read * kv,
            kv_gathered=layer.read * gathered * kv,
            kv_written=layer.stored * (written + len(plan.drafts)) * kv,
            indices=float(INDEX_BYTES * layer.kv_heads * listed * count),
            scores=float(layer.kv_heads * scored * SCORE_BYTES * (1 + SELECT_READS) * count),
            attention_flops=float(layer.attend_flops * pairs * count),
        )

    def seconds(
        self, plan: StepPlan, cached: Mapping[str, int], drafted: Mapping[str, int]
    ) -> float:
        """Return the time of a step; arguments are those of `traffic`, 0 rows take no time."""
        rows, logits = _rows(plan)
        if not rows:
            return 0.0
        traffic = self.traffic(plan, cached, drafted)
        layers = len(self.local.layers)
        local = roofline_seconds(traffic, self.hardware, self.efficiency, layers=layers).total
        row, vocab = self.shape.hidden * ACTIVATION_BYTES, self.shape.vocab * ACTIVATION_BYTES
        sums = SUMS_A_LAYER * layers + 1
        talk = sums * self.link.all_reduce(rows * row, self.ranks)
        return local + talk + self.link.all_gather(logits * vocab, self.ranks)


def _rows(plan: StepPlan) -> tuple[int, int]:
    """Return the rows of a step, and those of them that need logits."""
    decoding = plan.decode_rows
    prompts = sum(chunk.tokens for chunk in plan.prefills)
    return decoding + prompts, decoding + sum(chunk.emits for chunk in plan.prefills)
