"""Prompts of one length, decoded by the engine and by what transformers has for batches."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import pillarattn
from pillarattn.evaluation.batch_timing import timed_batch
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.engine_bench import timed_requests
from pillarattn.evaluation.generate_bench_cell import prompts

DYNAMIC, STATIC, BATCHING, PLAIN, SPECULATIVE = VARIANTS = (
    "dynamic", "static", "batching", "plain", "speculative",
)  # fmt: skip
OURS = (PLAIN, SPECULATIVE)
# Tokens of a page of transformers' paged cache, which has a name for it in later versions only.
PAGE = 256
Record = dict[str, Any]
Tokens = list[list[int]]
Run = Callable[[], tuple[Tokens, Record]]


class PeerCell:
    """A model, prompts, and runs of all variants on them.

    What a user's second call finds is kept from run to run: recorded passes of an engine, those of
    `generate_batch`, a compiled model. Whoever changes the model has a copy of it.

    Args:
        given: options of the command.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.model, tokenizer = load_model(given.model, device=given.device, dtype=given.dtype)
        self.ids = prompts(tokenizer, given.batch, given.length, shared=False)
        # Of each request; and prompt tokens that a pass reads at most, of an engine and of
        # `generate_batch` alike.
        self.room = given.length + given.new_tokens + given.k + 1
        self.chunk = max(2048, 32 * given.batch)
        self._runs: dict[str, Run] = {}
        self._patched: Any = None

    def run(self, name: str) -> tuple[Tokens, Record]:
        """Return the new tokens of each request, and how long it took whom.

        Raises:
            RuntimeError: `generate_batch` did not bring all requests back.
        """
        if name not in self._runs:
            self._runs[name] = self._new_run(name)
        worked = time.process_time()
        tokens, found = self._runs[name]()
        return tokens, {**found, "processor_seconds": time.process_time() - worked}

    def _new_run(self, name: str) -> Run:
        if name in (DYNAMIC, STATIC):
            return lambda: self._generate(static=name == STATIC)
        if name == BATCHING:
            # It may give the model another attention, and keeps its manager there.
            batching = deepcopy(self.model)
            return lambda: self._generate_batch(batching)
        if self._patched is None:
            self._patched = deepcopy(self.model)
            pillarattn.patch(self._patched, join_weights=self.model.device.type == "cuda")
        engine = self._new_engine(speculative=name == SPECULATIVE)
        return lambda: self._engine(engine)

    def _generate(self, *, static: bool) -> tuple[Tokens, Record]:
        ids = self.ids.to(self.model.device)
        extra = {"cache_implementation": "static"} if static else {}
        sequences, times = timed_batch(
            self.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            end_tokens=frozenset(), max_new_tokens=self.given.new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0, **extra,
        )  # fmt: skip
        return sequences[:, ids.shape[1] :].tolist(), self._figures(
            times.total_seconds, times.decoded_tokens, times.decode_seconds
        )

    def _generate_batch(self, model: Any) -> tuple[Tokens, Record]:
        config = GenerationConfig(
            max_new_tokens=self.given.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # By itself it takes nine tenths of the memory, and remembers the prompts of earlier runs.
        sizes = ContinuousBatchingConfig(
            num_blocks=self.given.batch * (2 + self.room // PAGE), max_batch_tokens=self.chunk,
            allow_block_sharing=False,
        )  # fmt: skip
        attention: list[str] = []

        def note_attention(*_: Any) -> None:
            handle.remove()
            attention.append(model.config._attn_implementation)

        handle = model.register_forward_pre_hook(note_attention)
        try:
            begun = time.perf_counter()
            found = model.generate_batch(
                inputs=self.ids.tolist(), generation_config=config, record_timestamps=True,
                continuous_batching_config=sizes, persistent_manager=True,
            )  # fmt: skip
            whole = time.perf_counter() - begun
        finally:
            handle.remove()
        outputs = list(found.values())
        failed = [one.error for one in outputs if one.error is not None]
        if failed or len(outputs) != len(self.ids):
            why = failed[0] if failed else "its log says why"
            raise RuntimeError(
                f"generate_batch brought {len(outputs) - len(failed)} of {len(self.ids)} requests "
                f"back: {why}"
            )
        times = [one.timestamps for one in outputs]
        # As elsewhere, what follows the last prompt.
        first, last = max(one[0] for one in times), max(one[-1] for one in times)
        decoded = sum(stamp > first for one in times for stamp in one)
        tokens = [list(map(int, one.generated_tokens)) for one in outputs]
        # Recorded passes run no hook.
        note = {"attention": attention[0]} if attention else {}
        return tokens, {**self._figures(whole, decoded, last - first), **note}

    def _new_engine(self, *, speculative: bool) -> Any:
        given = self.given
        config = pillarattn.EngineConfig(
            kv_tokens=given.batch * -(-self.room // 16) * 16, max_batch=given.batch,
            speculative=speculative, prefill_chunk=self.chunk, prefix_cache=False,
            pillar=pillarattn.PillarConfig(k=given.k, s=given.s),
        )  # fmt: skip
        return pillarattn.Engine(self._patched, config)

    def _engine(self, engine: Any) -> tuple[Tokens, Record]:
        params = pillarattn.SamplingParams(
            max_tokens=self.given.new_tokens, temperature=0.0, ignore_eos=True
        )
        texts = self.ids.tolist()
        begun = time.perf_counter()
        tokens, run = timed_requests(engine, texts, [params] * len(texts), len(texts))
        whole = time.perf_counter() - begun
        return tokens, self._figures(whole, run["tokens"], run["seconds"])

    def _figures(self, whole: float, decoded: int, seconds: float) -> Record:
        return {
            "whole_seconds": whole, "whole_tokens": self.given.batch * self.given.new_tokens,
            "decode_seconds": seconds, "decode_tokens": decoded,
        }  # fmt: skip
