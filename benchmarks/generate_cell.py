"""One cell of `generate_shapes`: every way to decode a batch of random prompts, timed when warm."""

from __future__ import annotations

import argparse
import warnings
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import pillarattn
from benchmarks.replayed_acceptance import ReplayedGenerator
from benchmarks.shape_cells import Record
from benchmarks.shape_limits import BASELINE
from benchmarks.shape_models import CompiledStep, free_bytes, wait
from pillarattn.config import AUTO
from pillarattn.decoding.acceptance import AcceptanceRule
from pillarattn.evaluation.batch_timing import timed_batch
from pillarattn.evaluation.generate_bench_cell import KEPT, PHASES

STATIC = "static"
# In order of their worth: a run that is killed has the first ones.
VARIANTS = ("dynamic", "plain", "speculative", "auto", BASELINE, STATIC)
# Whose text is not the model's.
REPLAYED = ("speculative", "auto")
# Runs, the last of which counts. The first compiles or records; a gate tries in the second what it
# does not know, and a new static cache may be compiled for again.
RUNS = {"auto": 3, STATIC: 3}
FEWEST_RUNS = 2
BASELINE_STEPS = 50
# What transformers leaves on a model that it has compiled for a static cache.
COMPILED = ("_compiled_call", "_last_compile_config", "_previous_max_cache_length")


class PlainGenerator(pillarattn.SelfSpeculativeGenerator):
    """Plain decoding by the library (k = 0), which knows when the prompt's token was there.

    Attributes:
        stamps: the host's time then.
    """

    def __init__(self) -> None:
        super().__init__(k=0)
        self.stamps: list[float] = []

    def new_rule(self, *, do_sample: bool) -> AcceptanceRule:
        """Return the rule of one generation, whose first verdict is noted."""
        self.stamps.clear()
        rule = super().new_rule(do_sample=do_sample)
        own, judge = vars(rule), rule.judge

        def noted(*arguments: Any) -> Any:
            del own["judge"]
            verdict = judge(*arguments)
            # The token is on its way still.
            if verdict.next_tokens.is_cuda:
                torch.cuda.synchronize()
            self.stamps.append(perf_counter())
            return verdict

        own["judge"] = noted
        return rule


class GenerateCell:
    """A batch of random prompts of one length.

    Args:
        given: options of the command.
        model: of a named shape; not patched, and so it is left.
        batch, length: rows, and prompt tokens of each.
    """

    def __init__(self, given: argparse.Namespace, model: Any, batch: int, length: int) -> None:
        self.given, self.model, self.batch, self.length = given, model, batch, length
        device = model.device
        noise = torch.Generator(device).manual_seed(batch * length)
        shape, most = (batch, length), model.config.vocab_size
        self._ids = torch.randint(1, most, shape, device=device, generator=noise)
        # New tokens of the model's own `generate`.
        self._expected: Tensor | None = None

    def measure(self, name: str) -> Record:
        """Return what a variant measures.

        Raises:
            MemoryError: it does not fit.
        """
        device = self.model.device
        # What a variant before has left is collected here: one that failed holds it until now.
        free_bytes(device)
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always", RuntimeWarning)
                found = self._baseline() if name == BASELINE else self._generated(name)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error).split(". ")[0]) from error
        finally:
            pillarattn.unpatch(self.model)
            self._forget_compiled()
        # Such as why passes were not recorded.
        told = {str(one.message) for one in heard if issubclass(one.category, RuntimeWarning)}
        found["warnings"] = sorted(told) or None
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device) if is_cuda else None
        return found

    def _baseline(self) -> Record:
        """Time the compiled step at the mean length of the others' decoding."""
        middle = self.length + self.given.new_tokens // 2
        plain = CompiledStep(self.model, batch=self.batch, length=middle, mode=self.given.compile)
        try:
            return {**plain.run(BASELINE_STEPS, 0), "step_length": middle, "tokens_per_round": 1.0}
        finally:
            plain.free()

    def _generated(self, name: str) -> Record:
        """Run `generate` until it is warm, and return the last run's figures."""
        pillar = self._assistant(name)
        extra: dict[str, Any] = {} if pillar is None else {"assistant": pillar}
        if name == STATIC:
            extra["cache_implementation"] = "static"
        if pillar is not None:
            pillarattn.patch(self.model, join_weights=self.model.device.type == "cuda")
        runs = []
        for _ in range(RUNS.get(name, FEWEST_RUNS)):
            new, run = self._timed(extra, pillar)
            runs.append(run)
        decoded = self.batch * (self.given.new_tokens - 1)
        found = {
            **runs[-1], "runs": runs, "tokens_per_second": decoded / runs[-1]["decode_seconds"],
            "tokens_per_round": 1.0,
        }  # fmt: skip
        if name == "dynamic":
            self._expected = new
        elif name not in REPLAYED and self._expected is not None:
            same = (new == self._expected).all(dim=1)
            found["equal_rows"] = same.float().mean().item()
        if pillar is not None:
            found |= self._figures_of(pillar, found)
            pillar.free()
        return found

    def _assistant(self, name: str) -> PlainGenerator | ReplayedGenerator | None:
        given = self.given
        if name == "plain":
            return PlainGenerator()
        if name == "speculative":
            return ReplayedGenerator(given.rate, k=given.k, s=given.s)
        if name == "auto":
            return ReplayedGenerator(given.rate, rate_k=given.k, k=AUTO, s=AUTO)
        return None

    def _timed(
        self, extra: dict[str, Any], pillar: PlainGenerator | ReplayedGenerator | None
    ) -> tuple[Tensor, Record]:
        """Return the new tokens of one run, `[B, T]` on the host, and its times."""
        wait(self.model.device)
        begun = perf_counter()
        tokens, times = timed_batch(
            self.model, {"input_ids": self._ids, "attention_mask": torch.ones_like(self._ids)},
            end_tokens=frozenset(), max_new_tokens=self.given.new_tokens, do_sample=False, **extra,
        )  # fmt: skip
        # The library may read a prompt in several passes: it ends where its token is there.
        prompt = times.prefill_seconds if pillar is None else pillar.stamps[0] - begun
        rounds = self.given.new_tokens - 1
        if isinstance(pillar, ReplayedGenerator):
            rounds = len(pillar.stamps) - 1
        decode = times.total_seconds - prompt
        run = {
            "prompt_seconds": prompt, "decode_seconds": decode, "rounds": rounds,
            "step_ms": 1000 * decode / rounds,
        }  # fmt: skip
        return tokens[:, self.length :].cpu(), run

    def _figures_of(self, pillar: PlainGenerator | ReplayedGenerator, found: Record) -> Record:
        """Return what the last run of an assistant did."""
        stats = pillar.stats.to_dict()
        figures: Record = {
            "stats": {name: stats[name] for name in KEPT},
            "host_seconds": {phase: stats[f"{phase}_seconds"] for phase in PHASES},
        }
        if isinstance(pillar, ReplayedGenerator):
            # Of one row. Rows end at different rounds, and the last ones have few.
            figures["tokens_per_round"] = stats["acceptance_length"]
            figures["acceptance_rate"] = stats["acceptance_rate"] if stats["drafted"] else None
            # Whatever share of the context a draft reads, and however many a round has.
            figures["chance_of_a_draft"] = pillar.chance
            if pillar.config.k != AUTO:
                emitted = 1 + self.given.rate * self.given.k
                # If all rows ran on with the mean acceptance, of which a short run is a sample.
                figures["tokens_per_second_at_rate"] = (
                    1000 * self.batch * emitted / found["step_ms"]
                )
        return figures

    def _forget_compiled(self) -> None:
        """Take from the model what a static cache has left: a later cell would pay for its size."""
        for name in COMPILED:
            vars(self.model).pop(name, None)
        torch._dynamo.reset()
