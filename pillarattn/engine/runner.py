"""Runs packed passes through a patched model, after making sure that it can be run so."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase
from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.packed_pass import PackedAttention, PackedStep, Segment
from pillarattn.engine.paged_cache import PagedCache, RequestView
from pillarattn.engine.pass_logits import PassLogits
from pillarattn.engine.step_buffers import StepBuffers
from pillarattn.errors import NotPatchedError, UnsupportedModelError
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import (
    LinearAttentionLayer,
    PreTrainedModel,
    cache_keyword,
    decode_context,
)
from pillarattn.patch.current_pass import current_cache
from pillarattn.patch.record import RECORD, PatchRecord
from pillarattn.patch.support import field, rope_types
from pillarattn.patch.tensor_parallel import ranks_of
from pillarattn.patch.wrappers import inner_model, weights_device

# Largest gap to plain passes, relative to the spread of the logits. Near 1e-6 in fp32; in half
# precision the root mean square counts, 0.03 to 0.05 in bf16 on a model of 30 layers.
EXACT_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.12
# What a forward raises that was given inputs it does not expect.
FAULTS = (RuntimeError, TypeError, IndexError, AttributeError, KeyError, AssertionError)


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

    Attributes:
        uses_buffers: whether requests attend by one call a layer, over `StepBuffers`.

    Raises:
        NotPatchedError: the model is not patched.
        UnsupportedModelError: its tokens cannot be packed; says why.
        ValueError: it is in training mode.
    """

    def __init__(
        self, model: Any, *, slots: int, host_slots: int, block_size: int, kernels: str,
        preflight: bool = True, graphs: bool = True,
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
        kernels = self.record.kernels if kernels == "auto" else kernels
        # On a CPU each request by itself is faster: there is no launch to save.
        self.uses_buffers = kernels == "triton" or (
            kernels == "auto" and self.device.type == "cuda"
        )
        self._takes_logits_to_keep = self.model._supports_logits_to_keep()
        self.attention = PackedAttention(self.name, kernels=kernels)
        if preflight and self.device.type != "meta":
            self._set_cache(32, 0, 1)
            try:
                self._check_packing()
            except FAULTS as error:
                raise UnsupportedModelError(
                    f"{self.name} could not run a packed pass ({type(error).__name__}: {error}); "
                    "use model.generate(assistant=) instead"
                ) from error
        self._set_cache(slots, host_slots, block_size)

    def _set_cache(self, slots: int, host_slots: int, block_size: int) -> None:
        self.cache = PagedCache(
            slots=slots, host_slots=host_slots, block_size=block_size, attention=self.attention
        )
        self.buffers = StepBuffers(self.cache, self.device)
        is_on = self.graphs_on and self.device.type == "cuda"
        self.graphs = GraphedPasses(is_on=is_on, device=self.device)

    @torch.no_grad()
    def run(self, segments: list[Segment]) -> PassLogits:
        """Run one pass and return each segment's last `keep` logits, `[keep, V]` fp32."""
        needed = self.buffers.needs(segments) if self.uses_buffers else None
        if needed is None:
            return self._run_packed(segments)
        step = self.buffers.load(segments, needed)
        if step.is_steady:

            def play() -> Tensor:
                step.begin()
                return self._forward(step, step.inputs())

            live = sum(len(s.tokens) for s in segments)
            logits = self.graphs.run(step.kind, self.buffers.generation, play, live=live)
            step.hand_over_scores()
            # The next pass may write where these are.
            logits = logits.to(torch.float32, copy=True)
            spans = [(p.end - p.segment.keep, p.segment.keep) for p in step.parts]
            return PassLogits(logits, spans)
        kept = [row for p in step.parts for row in range(p.end - p.segment.keep, p.end)]
        logits = self._kept_logits(step, step.inputs(), kept)
        step.hand_over_scores()
        return PassLogits.in_order(logits, [s.keep for s in segments])

    def _run_packed(self, segments: list[Segment]) -> PassLogits:
        """Run a pass in which requests attend one after the other."""
        ids = torch.tensor([t for s in segments for t in s.tokens], device=self.device)
        places = [p for s in segments for p in range(s.start, s.length)]
        inputs = {
            "input_ids": ids.unsqueeze(0),
            "position_ids": torch.tensor(places, device=self.device).unsqueeze(0),
        }
        ends = torch.tensor([len(s.tokens) for s in segments]).cumsum(0).tolist()
        kept = [
            row for s, end in zip(segments, ends, strict=True) for row in range(end - s.keep, end)
        ]
        logits = self._kept_logits(PackedStep(segments, self.device), inputs, kept)
        return PassLogits.in_order(logits, [s.keep for s in segments])

    def _kept_logits(
        self, step: PackedStep | MixedStep, inputs: dict[str, Tensor], kept: list[int]
    ) -> Tensor:
        """Run a pass and return the logits of some of its rows, `[len(kept), V]` fp32."""
        index = torch.tensor(kept, dtype=torch.int64, device=self.device)
        if not self._takes_logits_to_keep:
            return self._forward(step, inputs)[index].float()
        # A model may want at least one.
        wanted = index if kept else index.new_zeros(1)
        return self._forward(step, {**inputs, "logits_to_keep": wanted})[: len(kept)].float()

    def _forward(self, step: PackedStep | MixedStep, inputs: dict[str, Tensor]) -> Tensor:
        """Run the model and return its logits, `[rows, V]`."""
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

    def _check_packing(self) -> None:
        """Compare two texts packed into one pass, in two chunks, with each on its own."""
        config = self.model.config.get_text_config(decoder=True)
        generator = torch.Generator().manual_seed(20251201)
        texts = [
            torch.randint(1, config.vocab_size, (n,), generator=generator).tolist() for n in (9, 6)
        ]
        with torch.no_grad():
            plain = [
                self.model(input_ids=torch.tensor([t], device=self.device), use_cache=False)
                for t in texts
            ]
        slots = torch.randperm(32, generator=generator).to(self.device)
        spans = [slots[:9], slots[9:15]]
        view = RequestView(self.cache, reads_keys=False)
        gaps = []
        for begin, end in ((0, 4), (4, 9)):
            segments = [
                Segment(str(i), Phase.VERIFY, t[begin:end], begin, view, span[: min(end, len(t))],
                        keep=len(t[begin:end]))
                for i, (t, span) in enumerate(zip(texts, spans, strict=True))
            ]  # fmt: skip
            for output, logits in zip(plain, self.run(segments), strict=True):
                gaps.append(logits - output.logits[0, begin:end].float())
        spread = torch.cat([p.logits[0] for p in plain]).float().std().clamp_min(1e-6)
        is_exact = self.model.dtype in (torch.float32, torch.float64)
        joined = torch.cat(gaps)
        size = joined.abs().max() if is_exact else joined.square().mean().sqrt()
        gap, allowed = float(size / spread), EXACT_TOLERANCE if is_exact else COARSE_TOLERANCE
        if not gap <= allowed:
            raise UnsupportedModelError(
                f"{self.name}: requests packed into one pass differ from each on its own by "
                f"{gap:.2g} of the logits' spread (allowed: {allowed:g}); "
                "use model.generate(assistant=) instead"
            )


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
