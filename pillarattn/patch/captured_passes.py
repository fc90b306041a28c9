"""Draft and verify passes recorded as CUDA graphs, one a shape, and replayed on later lengths.

The layers of a Hugging Face model launch dozens of kernels each, and a host needs longer for that
than a GPU for the kernels. A replay launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from pillarattn.datatypes import LiveLengths, Phase, RowLengths
from pillarattn.errors import UnsupportedOptionError
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.step import StepState
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.fused_layers import FusedLayers
from pillarattn.patch.graph_recorder import (
    GraphRecorder,
    fault_reason,
    gap_reason,
    logits_gap,
    rounded,
    warn_eager,
)
from pillarattn.patch.static_selection import StaticSelection

# Recordings that are kept: of one s and k it is three, and a cost gate tries several.
MOST = 16
# Verify passes of a width are recorded once it was wanted more often than this.
RARE = 4
# Row scores of verify passes may take so much of what the cache takes, together.
SCORE_SHARE = 0.25
# Lengths of a verify pass are rounded up to a multiple of this, and of an eighth of them.
LEAST_SPAN = 512
Forward = Callable[[dict[str, Any], StepState, int], Tensor]


@dataclass
class Recording:
    """One pass over memory of its own.

    Attributes:
        width: Q, tokens a row.
        inputs: of the model's forward; tensors are filled before each replay.
        live: the rows' lengths before the pass, likewise.
        step: what attention is told.
        chosen: the keys that a draft reads, likewise.
        replay: runs it; None before it is recorded.
        logits: `[B, Q, V]`, what a replay leaves.
        scores: row scores by layer, likewise.
        first: lengths that it was recorded at.
    """

    width: int
    inputs: dict[str, Any]
    live: LiveLengths
    step: StepState
    chosen: StaticSelection | None
    replay: Callable[[], None] | None = None
    logits: Tensor | None = None
    scores: dict[int, Tensor] = field(default_factory=dict)
    visited: list[int] = field(default_factory=list)
    first: tuple[int, ...] = ()


class CapturedPasses:
    """Replays a model's passes over one cache, where their shapes allow it.

    A pass of a new shape runs eagerly over the memory of its recording, the next one is recorded,
    and all later ones are replayed. The first replay of a kind at other lengths is compared with
    the eager pass: a model that lets the host look at lengths would repeat the recorded ones. What
    cannot be recorded, or differs, runs eagerly from then on, after one warning.

    Args:
        forward: runs the model on inputs and a step; returns the logits of the last Q tokens, a
            number that comes third.
        cache: the one that the passes write to.
        proven: kinds of passes that were compared; shared by the runs of a model.
        fused: layers that recorded passes run with fewer kernels; compared with them as well.
        strict: run nothing eagerly: its rounding differs.
        widest: tokens a row that every scored verify pass runs with, or a little more than half of
            it where that is enough, so that two recordings serve rounds of all lengths; None: as
            many as each has.
        least_keys: keys that the memory of selections holds at least, likewise for all shares.

    Attributes:
        reason: why nothing is replayed any more, or None.
        replayed: passes that were replayed.
        settled: whether all passes since it was last set were replayed.
    """

    def __init__(
        self,
        forward: Forward | None,
        cache: PillarCache,
        proven: set[Any],
        fused: FusedLayers | None = None,
        *,
        strict: bool = False,
        widest: int | None = None,
        least_keys: int = 0,
    ) -> None:
        self._forward = forward
        self.cache = cache
        self.proven = proven
        self.fused = fused
        self.strict = strict
        self.widest = widest
        self.least_keys = least_keys
        self.reason: str | None = None
        self.replayed = 0
        self.settled = True
        self._kept: dict[Any, Recording] = {}
        # How often a verify pass of a width was wanted that has no recording.
        self._wanted: dict[int, int] = {}
        # Where the cache's buffers lie, the objects that do, and the tokens that fit a row.
        self._memory: tuple[tuple[int, int], ...] | None = None
        self._buffers: list[ref[Tensor]] = []
        self._capacity = 0
        self._recorder = GraphRecorder()

    def width_for(self, width: int, step: StepState) -> int:
        """Return how many tokens a pass of `width` should run with: more, where that is recorded.

        The last rounds of a generation draft less and less, and would be recorded in vain.
        """
        if step.phase is not Phase.VERIFY or self.strict or self.reason is not None:
            return width
        is_common = self.widest is not None and step.scores is not None
        if width == 1 and not is_common:
            return width
        room = min(layer.capacity for layer in self.cache.used_layers) - self.cache.lengths.max
        if is_common and self.widest is not None:
            # Half of it has rows enough for most rounds.
            half = self.widest // 2 + 1
            wide = half if width <= half else max(width, self.widest)
            return wide if wide <= room else width
        wider = {
            held.width
            for held in self._kept.values()
            if held.step.phase is Phase.VERIFY and held.first and held.width <= room
        }
        if width in wider:
            return width
        self._wanted[width] = self._wanted.get(width, 0) + 1
        if self._wanted[width] > RARE:
            return width
        return min(
            (w for w in wider if w > width and (step.phase, w) in self.proven), default=width
        )

    def run(
        self, inputs: dict[str, Any], step: StepState, *, width: int, kept: int | None = None
    ) -> Tensor | None:
        """Run a pass of `width` tokens a row and return its logits, or None: run it eagerly.

        The logits are fresh; row scores stay valid until the next pass.

        Args:
            inputs: of the model's forward.
            step: as an eager pass would have it.
            width: tokens a row in `inputs`.
            kept: how many of them count, the first ones; the others leave no trace. None: all.
        """
        key = self._key(inputs, step, width)
        if key is None:
            if self.strict and step.phase is Phase.VERIFY:
                raise UnsupportedOptionError(
                    "strict=True keeps a cache where it is, and a pass found no room in it; pass "
                    "no cache, or a PillarCache(limit=...) that holds the whole text"
                )
            self.settled = False
            return None
        base = self.cache.lengths
        held = self._kept.pop(key, None)
        is_new = held is None
        try:
            recording = held or self._recording(inputs, step, key, width)
            self._fill(recording, inputs, step, base)
            if is_new:
                self._play(recording)
            elif recording.replay is None:
                recording.replay = self._record(recording)
                recording.first = base.host
                recording.replay()
            else:
                recording.replay()
                self.replayed += 1
        except Exception as error:
            self._set_lengths(base)
            self._give_up(fault_reason(error))
            return None
        self._kept[key] = recording
        kept = width if kept is None else kept
        self._hand_over(recording, step, base.plus(kept), kept)
        assert recording.logits is not None
        logits = recording.logits[:, :kept].to(torch.float32, copy=True)
        if recording.first == base.host or not recording.first:
            self.settled = False
            return logits
        if self.strict:
            self._check_again(recording, logits, base)
            return logits
        if self._is_proven(logits, inputs, step, base, width=width, kept=kept):
            return logits
        return None

    def will_replay(self, inputs: dict[str, Any], step: StepState, width: int) -> bool:
        """Whether `run` would replay such a pass, and neither record nor compare it."""
        held = self._kept.get(self._key(inputs, step, width))
        if held is None or held.replay is None:
            return False
        return self._kind(step, width) in self.proven and held.first != self.cache.lengths.host

    def _kind(self, step: StepState, width: int) -> tuple[Any, ...]:
        """Return what a pass has in common with those that are compared once for all of them."""
        return (step.phase, width, "strict") if self.strict else (step.phase, width)

    def rebound(self, forward: Forward | None, fused: FusedLayers | None) -> CapturedPasses:
        """Return the same recordings for another run over the cache; None: they hold no model."""
        self._forward, self.fused = forward, fused
        return self

    def close(self) -> None:
        """Free the recordings."""
        self._kept.clear()

    def _key(self, inputs: dict[str, Any], step: StepState, width: int) -> Any:
        """Return what a recording can be shared by, or None where the pass has no fixed shape."""
        cache = self.cache
        layers = cache.used_layers
        if self.reason is not None or step.refresh is not None or not layers:
            return None
        capacity = self._look_at_memory(layers)
        most = cache.lengths.max + width
        if most > capacity:
            # The buffers will move.
            return None
        is_sparse = step.phase is Phase.DRAFT and len(step.selections) == len(layers)
        span = capacity if is_sparse else min(capacity, rounded(most, LEAST_SPAN))
        chosen = None
        if step.phase is Phase.DRAFT and step.selections:
            chosen = StaticSelection.kind_of(step.selections, self.least_keys)
            if chosen is None:
                return None
        shapes = tuple(
            (name, tuple(value.shape) if isinstance(value, Tensor) else repr(value))
            for name, value in inputs.items()
            if value is not cache
        )
        wants_scores = step.scores is not None
        return (step.phase, width, span, chosen, shapes, wants_scores, step.scored_layers,
                step.row_limit)  # fmt: skip

    def _look_at_memory(self, layers: list[Any]) -> int:
        """Return the tokens that fit a row; what was recorded over buffers elsewhere is freed."""
        known = self._buffers
        if len(known) == len(layers) and all(
            held() is layer.key_buffer for held, layer in zip(known, layers, strict=True)
        ):
            return self._capacity
        buffers = [one for layer in layers for one in (layer.key_buffer, layer.value_buffer)]
        # All addresses: one layer's new buffer may lie where another's was.
        memory = tuple((one.data_ptr(), one.shape[2]) for one in buffers if one is not None)
        if memory != self._memory:
            self._kept.clear()
            self._memory = memory
        # An object that is still there still has its memory.
        self._buffers = [ref(layer.key_buffer) for layer in layers if layer.key_buffer is not None]
        self._capacity = min(layer.capacity for layer in layers)
        return self._capacity

    def _recording(
        self, inputs: dict[str, Any], step: StepState, key: Any, width: int
    ) -> Recording:
        """Return memory for passes like this one; room is made by those used longest ago."""
        while len(self._kept) >= MOST or self._score_bytes() > SCORE_SHARE * self._cache_bytes():
            del self._kept[next(iter(self._kept))]
        base, span = self.cache.lengths, key[2]
        chosen = None
        if key[3] is not None:
            chosen = StaticSelection(step.selections, self.least_keys)
        live = LiveLengths([span - width] * len(base.host), base.device, tensor=base.tensor.clone())
        own = StepState(
            step.phase,
            selections={} if chosen is None else chosen.selections,
            scored_layers=step.scored_layers,
            row_limit=step.row_limit,
        )
        held = {n: v.clone() if isinstance(v, Tensor) else v for n, v in inputs.items()}
        return Recording(width, held, live, own, chosen)

    def _fill(
        self, recording: Recording, inputs: dict[str, Any], step: StepState, base: RowLengths
    ) -> None:
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                recording.inputs[name].copy_(value)
        recording.live.tensor.copy_(base.tensor)
        recording.step.scores = None if step.scores is None else ScoreBuffer()
        if recording.chosen is not None:
            recording.chosen.load(step.selections)

    def _play(self, recording: Recording) -> None:
        """Run the pass over the recording's memory; while a graph records, this is what it sees."""
        assert self._forward is not None
        recording.live.forget_later()
        self._set_lengths(recording.live)
        recording.step.visited.clear()
        with nullcontext() if self.fused is None else self.fused.active():
            recording.logits = self._forward(recording.inputs, recording.step, recording.width)
        recording.visited = list(recording.step.visited)
        scores = recording.step.scores
        if scores is not None:
            recording.scores = {i: scores.take(i) for i in recording.step.scored_layers}

    def _record(self, recording: Recording) -> Callable[[], None]:
        """Record the pass and return its replay."""
        return self._recorder.record(lambda: self._play(recording), recording.live.device)

    def _hand_over(
        self, recording: Recording, step: StepState, grown: RowLengths, kept: int
    ) -> None:
        """Leave cache and step as an eager pass of `kept` tokens would."""
        self._set_lengths(grown)
        step.visited.clear()
        step.visited.extend(recording.visited)
        if step.scores is not None:
            for layer, rows in recording.scores.items():
                step.scores.put(layer, rows[:, :, :kept, : grown.max], grown)

    def _is_proven(
        self, logits: Tensor, inputs: dict[str, Any], step: StepState, base: RowLengths,
        *, width: int, kept: int,
    ) -> bool:  # fmt: skip
        """Whether replays of a kind give what the model's own code does; looked at once.

        If not, the cache is as it was before the pass.
        """
        kind = self._kind(step, width)
        if kind in self.proven:
            return True
        assert self._forward is not None
        self.settled = False
        self._set_lengths(base)
        own = replace(step, scores=None if step.scores is None else ScoreBuffer(), visited=[])
        eager = self._forward(inputs, own, width)[:, :kept]
        gap, allowed = logits_gap(logits, eager)
        if gap <= allowed:
            self.proven.add(kind)
            self._set_lengths(base.plus(kept))
            return True
        self._set_lengths(base)
        self._give_up(gap_reason(gap, allowed))
        return False

    def _check_again(self, recording: Recording, logits: Tensor, base: RowLengths) -> None:
        """Run a replayed pass without its graph, once a kind: the same kernels, the same bits."""
        kind = self._kind(recording.step, recording.width)
        if kind in self.proven:
            return
        self._set_lengths(base)
        # A graph leaves its results where they lie: nothing else may take their place.
        left, scores = recording.logits, recording.scores
        self._play(recording)
        again, recording.logits, recording.scores = recording.logits, left, scores
        self._set_lengths(base.plus(recording.width))
        assert again is not None
        if not torch.equal(again.float(), logits):
            self._give_up("a replayed pass differs from the same one without its graph")
        self.proven.add(kind)

    def _score_bytes(self) -> int:
        """Return what the row scores of all recordings take."""
        return sum(rows.nbytes for held in self._kept.values() for rows in held.scores.values())

    def _cache_bytes(self) -> int:
        buffers = [layer.key_buffer for layer in self.cache.used_layers]
        return 2 * sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def _set_lengths(self, lengths: RowLengths) -> None:
        for layer in self.cache.used_layers:
            layer.lengths = lengths

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.close()
        if self.strict:
            raise UnsupportedOptionError(f"strict=True cannot go on: {reason}; use strict=False")
        warn_eager(reason)
