"""Runs packed passes through a patched model, after making sure that it can be run so."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import on_device
from pillarattn.engine.batched_draws import PendingDraws
from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.engine.fused_passes import FusedPasses
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.model_watch import Change, ModelWatch
from pillarattn.engine.packable import refusal
from pillarattn.engine.packed_pass import PackedAttention, PackedStep, Segment
from pillarattn.engine.packing_check import PackingCheck
from pillarattn.engine.paged_cache import PagedCache
from pillarattn.engine.pass_logits import PassLogits
from pillarattn.engine.row_buckets import RowBuckets
from pillarattn.engine.step_buffers import StepBuffers
from pillarattn.engine.strict_passes import StrictCheck, check_rows, refusal_of
from pillarattn.errors import NotPatchedError, UnsupportedModelError, UnsupportedOptionError
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import (
    PreTrainedModel,
    cache_keyword,
    decode_context,
)
from pillarattn.patch.current_pass import current_cache
from pillarattn.patch.obstacle import obstacle
from pillarattn.patch.record import RECORD, PatchRecord
from pillarattn.patch.strict import check_strict, strict_products
from pillarattn.patch.wrappers import inner_model, weights_device

# What a forward raises that was given inputs it does not expect.
FAULTS = (RuntimeError, TypeError, IndexError, AttributeError, KeyError, AssertionError)

# Slots, host slots and block size of the pool that it is tried with.
PREFLIGHT_CACHE = 32, 0, 1


class ModelRunner:
    """A patched model, its pool, and one forward pass a step.

    Args:
        model: patched by `pillarattn.patch`.
        slots: tokens of the pool.
        host_slots: tokens of the host's pool.
        block_size: tokens of a block.
        kernels: "auto", "reference" or "triton".
        preflight: compare packed passes with plain ones on random tokens first.
        graphs: record passes as CUDA graphs on a GPU.
        is_delayed: whether passes begin before the ones before are looked at.
        strict_rows: rows of a step at most, of which none may depend on the others, bit for bit;
            None: rounding may.

    Attributes:
        uses_buffers: whether requests attend by one call a layer, over `StepBuffers`, and layers
            may be fused.

    Raises:
        NotPatchedError: the model is not patched.
        UnsupportedModelError: its tokens cannot be packed; says why.
        UnsupportedOptionError: its rows depend on each other, and must not; says why.
        ValueError: it is in training mode.
    """

    def __init__(
        self, model: Any, *, slots: int, host_slots: int, block_size: int, kernels: str,
        preflight: bool = True, graphs: bool = True, is_delayed: bool = False,
        strict_rows: int | None = None,
    ) -> None:  # fmt: skip
        self.model: PreTrainedModel = inner_model(model)
        self.name = type(self.model).__name__
        record = getattr(self.model, RECORD, None)
        if record is None:
            raise NotPatchedError(f"{self.name} is not patched; call pillarattn.patch(model) first")
        self.record: PatchRecord = record
        if self.model.training:
            raise ValueError(f"{self.name} is in training mode; call model.eval() first")
        reason = refusal(self.model, self.record)
        if reason is not None:
            raise UnsupportedModelError(
                f"the engine cannot pack requests of {self.name}: {reason}; "
                "use model.generate(assistant=) instead"
            )
        self.device, self.graphs_on = weights_device(self.model), graphs
        self._is_delayed, self._is_strict = is_delayed, strict_rows is not None
        kernels = self.record.kernels if kernels == "auto" else kernels
        self.uses_buffers = wants_buffers(kernels, self.device)
        self._takes_logits_to_keep = self.model._supports_logits_to_keep()
        self.attention = PackedAttention(self.name, kernels=kernels)
        self.fused = FusedPasses(
            self.model, record.fused, kernels=kernels, is_strict=self._is_strict
        )
        self._watch = ModelWatch(self.model)
        # Without layers: a preflight finds out which there are.
        self.cache = PagedCache(slots=0, host_slots=0, block_size=1, attention=self.attention)
        if (preflight or self._is_strict) and self.device.type != "meta":
            self._preflight()
        if strict_rows is not None:
            self._check_strict(strict_rows)
        self._set_cache(slots, host_slots, block_size)

    def look_again(self) -> None:
        """Look closely at the model before the next pass; any thread may say so.

        To be called wherever weights, adapters, hooks or parts may have changed.
        """
        self._watch.ask()

    def _set_cache(self, slots: int, host_slots: int, block_size: int) -> None:
        earlier = self.cache
        self.cache = PagedCache(
            slots=slots, host_slots=host_slots, block_size=block_size, attention=self.attention
        )
        self.cache.lay_out_as(earlier)
        self.cache.mover.prepare()
        self.buffers = StepBuffers(
            self.cache, self.device, is_delayed=self._is_delayed, is_strict=self._is_strict
        )
        self.fused.use(self.cache)
        self._renew_graphs()

    def _renew_graphs(self) -> None:
        is_on = self.graphs_on and self.device.type == "cuda"
        self.graphs = GraphedPasses(is_on=is_on, device=self.device)
        self._row_buckets = RowBuckets(self.graphs)
        if is_on:
            self.graphs.reason = obstacle(self.model, PillarCache())

    def _preflight(self) -> None:
        """Make sure that packed passes give the logits of plain ones, fused layers or not."""
        check = PackingCheck(self.model, self.device)
        self.fused.is_on = False
        self._set_cache(*PREFLIGHT_CACHE)
        try:
            gap = check.gap(self.cache, self.run)
        except FAULTS as error:
            raise UnsupportedModelError(
                f"{self.name} could not run a packed pass ({type(error).__name__}: {error}); "
                "use model.generate(assistant=) instead"
            ) from error
        if not gap <= check.allowed:
            raise UnsupportedModelError(
                f"{self.name}: requests packed into one pass differ from each on its own by "
                f"{gap:.2g} of the logits' spread (allowed: {check.allowed:g}); "
                "use model.generate(assistant=) instead"
            )
        self.fused.is_on = True
        if self.fused.has_layers:
            self._set_cache(*PREFLIGHT_CACHE)
            gap = check.gap(self.cache, self.run)
            if not gap <= check.allowed:
                self.fused.give_up(gap, check.allowed)

    def _check_strict(self, rows: int) -> None:
        """Make sure that rows do not depend on each other, in products and in a pass."""
        windows = [layer.window for layer in self.cache.layers]
        reason = refusal_of(self.model, windows, uses_buffers=self.uses_buffers)
        check_strict(self.model, self.fused.layers, reason)
        config = self.model.config.get_text_config(decoder=True)
        check = StrictCheck(config.vocab_size, self.device)
        self._set_cache(*PREFLIGHT_CACHE)
        with strict_products():
            check_rows(self.model, rows)
            if not check.holds(self.cache, self.run):
                raise UnsupportedOptionError(
                    f"strict=True cannot run here: rows of {self.name} that are packed into one "
                    "pass have other bits than each on its own; use strict=False"
                )

    def _products(self) -> AbstractContextManager[None]:
        return strict_products() if self._is_strict else nullcontext()

    def _look(self) -> None:
        """Follow what has changed in the model since the last pass."""
        if not self._watch.is_due():
            return
        try:
            with self.record.active(), self.record.own_code.active(self.model):
                change = self._watch.look()
                if change is Change.CODE:
                    self.graphs.close()
                    self._renew_graphs()
                    self.fused.renew()
                elif change is Change.WEIGHTS:
                    self.fused.refill()
        except BaseException:
            # Half of it may have been followed.
            self._watch.forget()
            raise

    @torch.no_grad()
    def run(self, segments: list[Segment], ahead: PendingDraws | None = None) -> PassLogits:
        """Run one pass and return each segment's last `keep` logits, `[keep, V]` fp32.

        Args:
            segments: the rows of each request; with `PENDING` tokens only where `takes` says so.
            ahead: what the pass before draws, which are those tokens.

        Raises:
            UnsupportedOptionError: strict mode can no longer run the model's passes; says why.
        """
        with self._products():
            return self._run(segments, ahead)

    def _run(self, segments: list[Segment], ahead: PendingDraws | None) -> PassLogits:
        self._begin()
        if not self.uses_buffers:
            return self._run_packed(segments)
        self._look()
        # Prompts by themselves have rows enough for a call each, which is faster on so many.
        may_be_alone = self.fused.is_settled and not self._is_strict
        is_alone = may_be_alone and all(map(_is_prompt, segments))
        needed = None if is_alone else self.buffers.needs(segments)
        if needed is None and self._is_strict:
            raise UnsupportedOptionError(
                "strict=True cannot run this pass: its requests need calls of their own; "
                "use strict=False"
            )
        if needed is None:
            return self._run_packed(segments)
        buckets = self._row_buckets if self._may_replay() else None
        step = self.buffers.load(segments, needed, ahead, buckets)
        if step.is_steady:

            def play() -> Tensor:
                return self._forward(step, step.inputs())

            # The next pass may write where the logits are.
            logits = self._steady(step, play).to(torch.float32, copy=True)
            step.hand_over_scores()
            spans = [(p.end - p.segment.keep, p.segment.keep) for p in step.parts]
            return PassLogits(logits, spans)
        kept = [row for p in step.parts for row in range(p.end - p.segment.keep, p.end)]
        logits = self._kept_logits(step, step.inputs(), kept)
        step.hand_over_scores()
        return PassLogits.in_order(logits, [s.keep for s in segments])

    @torch.no_grad()
    def run_step(
        self, kind: Hashable, play: Callable[[Callable[[MixedStep], Tensor]], Tensor]
    ) -> Tensor:
        """Run a step with all that comes before and after its pass; return what `play` does.

        Once the model's passes are proven, a step is recorded as a whole; until then its pass is.

        Args:
            kind: what steps share that launch the same kernels; None: the host has a say in it.
            play: runs the step; it is given what runs a pass whose inputs lie in `buffers`, and
                returns its logits `[rows, V]`, which hold until the next pass.
        """
        with self._products():
            return self._run_step(kind, play)

    def _run_step(
        self, kind: Hashable, play: Callable[[Callable[[MixedStep], Tensor]], Tensor]
    ) -> Tensor:
        self._begin()
        self._look()

        def forward(step: MixedStep) -> Tensor:
            return self._forward(step, step.inputs())

        if kind is None or not (self._may_replay() and self.graphs.is_proven):
            return play(lambda step: self._steady(step, partial(forward, step)))
        return self.graphs.run(kind, self.buffers.generation, partial(play, forward), live=None)

    def padded(self, rows: int, *rest: Hashable) -> int:
        """Return how many rows a step of `rows` rows has, those of nobody included.

        Args:
            rows: of requests.
            rest: what makes up its kind beside the rows.
        """
        buckets = self._row_buckets if self._may_replay() else None
        return self.buffers.padded(rows, *rest, buckets=buckets, of_steps=True)

    @property
    def runs_ahead(self) -> bool:
        """Whether drafts can begin before those before them are known: without, nobody idles."""
        return self.uses_buffers and all(layer.window is None for layer in self.cache.layers)

    def takes(self, segments: list[Segment]) -> bool:
        """Whether a pass can run while its `PENDING` tokens are known on the device alone."""
        return self.uses_buffers and self.buffers.needs(segments) is not None

    def _begin(self) -> None:
        """Make ready for a pass.

        Raises:
            NotPatchedError: the model has been unpatched: its own attention knows no pool.
        """
        if vars(self.model).get(RECORD) is not self.record:
            raise NotPatchedError(
                f"{self.name} has been unpatched since this engine was made, or patched again; "
                "make another engine of the patched model"
            )
        if self._is_strict and torch.is_autocast_enabled(self.device.type):
            raise UnsupportedOptionError(
                "strict=True runs kernels that autocast does not know; call the engine outside of "
                "torch.autocast, or use strict=False"
            )
        self.cache.mover.give_back()
        # Where nothing may ever be recorded, passes are as they always are.
        self.graphs.begin(is_usual=self.fused.is_settled)

    def _steady(self, step: MixedStep, play: Callable[[], Tensor]) -> Tensor:
        """Return the logits of a pass that may be recorded, which hold until the next one."""
        if not self._may_replay():
            return play()
        return self.graphs.run(step.kind, self.buffers.generation, play, live=step.live)

    def _may_replay(self) -> bool:
        # Under autocast, weights in half precision are copies that end with the user's block.
        return self.fused.is_settled and not torch.is_autocast_enabled(self.device.type)

    def _run_packed(self, segments: list[Segment]) -> PassLogits:
        """Run a pass in which requests attend one after the other."""
        ids = on_device([t for s in segments for t in s.tokens], self.device)
        places = on_device([p for s in segments for p in range(s.start, s.length)], self.device)
        inputs = {"input_ids": ids.unsqueeze(0), "position_ids": places.unsqueeze(0)}
        ends = list(accumulate(len(s.tokens) for s in segments))
        kept = [
            row for s, end in zip(segments, ends, strict=True) for row in range(end - s.keep, end)
        ]
        logits = self._kept_logits(PackedStep(segments, self.device), inputs, kept)
        return PassLogits.in_order(logits, [s.keep for s in segments])

    def _kept_logits(
        self, step: PackedStep | MixedStep, inputs: dict[str, Tensor], kept: list[int]
    ) -> Tensor:
        """Run a pass and return the logits of some of its rows, `[len(kept), V]` fp32."""
        index = on_device(kept, self.device)
        if not self._takes_logits_to_keep:
            return self._forward(step, inputs)[index].float()
        # A model may want at least one.
        wanted = index if kept else index.new_zeros(1)
        return self._forward(step, {**inputs, "logits_to_keep": wanted})[: len(kept)].float()

    def _forward(self, step: PackedStep | MixedStep, inputs: dict[str, Tensor]) -> Tensor:
        """Run the model, by fused layers where it has such; return its logits, `[rows, V]`."""
        if not self.uses_buffers or torch.is_autocast_enabled(self.device.type):
            return self._run_model(step, inputs)
        if isinstance(step, PackedStep):
            return self.fused.run(lambda: self._run_model(step, inputs), live=None)
        seeds = [part.segment.seeds for part in step.parts if part.segment.seeds is not None]
        kept = [dict(state.seeds) for state in seeds]

        def play() -> Tensor:
            # What an earlier run of the same pass has left is not there for this one.
            step.begin()
            for state, before in zip(seeds, kept, strict=True):
                state.seeds = dict(before)
            return self._run_model(step, inputs)

        return self.fused.run(play, live=step.live)

    def _run_model(self, step: PackedStep | MixedStep, inputs: dict[str, Tensor]) -> Tensor:
        given: dict[str, Any] = {**inputs, "use_cache": True, cache_keyword(): self.cache}
        self.cache.step = step
        try:
            with (
                self.record.active(),
                self.record.own_code.active(self.model),
                decode_context(self.model),
                current_cache(self.cache),
            ):
                logits: Tensor = self.model(**given, return_dict=True).logits[0]
        finally:
            self.cache.step = None
        return logits


def _is_prompt(segment: Segment) -> bool:
    return segment.keep < len(segment.tokens)


def wants_buffers(kernels: str, device: torch.device) -> bool:
    """Whether one call a layer is faster: on a CPU there is no launch to save."""
    return kernels == "triton" or (kernels == "auto" and device.type == "cuda")
