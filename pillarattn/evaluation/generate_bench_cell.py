"""One cell of `bench generate`: every variant checked, then timed in turns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pillarattn.evaluation.batch_timing import BatchTimes, timed_batch
from pillarattn.evaluation.generate_bench_settings import GenerateBench, Variant
from pillarattn.evaluation.lossless import check_lossless
from pillarattn.evaluation.tasks.worked_maths import worked_maths
from pillarattn.evaluation.token_equality import compare_tokens
from pillarattn.patch.compat import cache_keyword

# Prompt tokens that each run reads itself where the others come from a shared cache: they choose
# the first keys.
LEFT = 16
CHUNK = 1024
# Tokens in which a gate has drafted, too.
GATE_TOKENS = 96
PHASES = ("draft", "verify", "select", "accept")
# Statistics of a run that a record keeps.
KEPT = (
    "rounds", "plain_rounds", "drafted", "accepted", "acceptance_rate", "acceptance_length",
    "acceptance_by_position", "keys_read_per_draft_step", "keys_full_per_draft_step", "decisions",
)  # fmt: skip
Heard = Callable[[str], None]


class BenchCell:
    """A batch of prompts of one length, and runs of all variants on it.

    Args:
        bench: settings.
        model: patched.
        tokenizer: the model's.
        batch, length: the cell.
        on_run: told of every run before it starts, by name.
    """

    def __init__(
        self, bench: GenerateBench, model: Any, tokenizer: Any, *, batch: int, length: int,
        on_run: Heard,
    ) -> None:  # fmt: skip
        self.bench = bench
        self.model = model
        self.ids = prompts(tokenizer, batch, length, shared=bench.shared_prompt).to(model.device)
        self.on_run = on_run
        # One assistant for all runs of a variant, as a user has it: the gate remembers the model.
        self._assistants = {
            variant.name: bench.assistant(variant)
            for variant in bench.variants
            if variant.k is not None
        }
        self._cache: Any = None
        if bench.reuse_prompt:
            self._cache = self._prompt_cache()

    def run(self) -> list[dict[str, Any]]:
        """Check and time every variant; return one record a variant."""
        variants = self.bench.variants
        verdicts = [self._check(variant) for variant in variants]
        found: list[dict[str, Any]] = [
            {
                "name": variant.name, "k": variant.k, "s": variant.s, "runs": [],
                "lossless": verdict,
            }
            for variant, verdict in zip(variants, verdicts, strict=True)
        ]  # fmt: skip
        expected: Tensor | None = None
        for repeat in range(self.bench.repeats + 1):
            # The first round warms up. Each one begins with another variant, so that none has the
            # same neighbour throughout.
            for at in range(len(variants)):
                place = (at + repeat) % len(variants) if repeat else at
                tokens, times = self._timed(variants[place], found[place], repeat)
                expected = tokens if expected is None else expected
                self._compare(found[place], expected, tokens, times)
            if repeat == 0:
                self._record_again(variants, found)
        for variant, record in zip(variants, found, strict=True):
            if variant.k is not None:
                record["profile"] = self._profile(variant, record)
            summarise(record)
        self._free()
        return found

    def _timed(
        self, variant: Variant, record: dict[str, Any], repeat: int
    ) -> tuple[Tensor, BatchTimes]:
        bench = self.bench
        self.on_run(f"{variant.name}, {'warm-up' if repeat == 0 else f'run {repeat}'}")
        extra, assistant = self._options(variant), None
        if variant.k is not None:
            assistant = extra["assistant"]
        _reset_peak(self.model)
        torch.manual_seed(1000 * repeat + 1)
        tokens, times = timed_batch(
            self.model,
            {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)},
            end_tokens=frozenset(),
            **self._common(bench.new_tokens),
            **extra,
        )
        run = {"prefill_seconds": times.prefill_seconds, "decode_seconds": times.decode_seconds}
        stats = None if assistant is None else assistant.stats.to_dict()
        if stats is not None:
            run |= {f"{phase}_seconds": stats[f"{phase}_seconds"] for phase in PHASES}
        kept = None if stats is None else {name: stats[name] for name in KEPT}
        if repeat:
            record["runs"].append(run)
            record["stats"] = kept
        elif "warm_up" not in record:
            # A gate's first run, which knows nothing yet; and the one whose memory is its own.
            record["warm_up"] = {**run, "stats": kept}
            record["peak_bytes"] = _peak(self.model)
            self._free()
        return tokens, times

    def _record_again(self, variants: list[Variant], found: list[dict[str, Any]]) -> None:
        """On a GPU, let assistants keep what a user's next call finds: recorded passes."""
        if self.model.device.type == "cuda":
            for variant, record in zip(variants, found, strict=True):
                if variant.k is not None:
                    self._timed(variant, record, 0)

    def _free(self) -> None:
        for assistant in self._assistants.values():
            assistant.free()

    def _compare(
        self, record: dict[str, Any], expected: Tensor, tokens: Tensor, times: BatchTimes
    ) -> None:
        """Note, for greedy runs, whether what was timed is what plain decoding gives."""
        record["decoded_tokens"] = times.decoded_tokens
        if self.bench.temperature == 0:
            same = tokens.shape == expected.shape and bool((tokens == expected).all())
            record["same_tokens"] = record.get("same_tokens", True) and same

    def _check(self, variant: Variant) -> dict[str, Any] | None:
        """Return the verdict on a variant's tokens; sampling is checked with seeded noise."""
        bench = self.bench
        if variant.k is None or not bench.check_tokens:
            return None
        self.on_run(f"{variant.name}, check")
        # A gate needs room before it tries anything.
        least = 0 if variant.is_fixed else min(bench.new_tokens, GATE_TOKENS)
        options = self._common(max(bench.check_tokens, least))
        assistant = bench.assistant(variant)
        if bench.temperature > 0:
            assistant = bench.assistant(variant, seed=bench.seed or 0)
        inputs = {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)}
        if self._cache is None:
            return check_lossless(self.model, inputs, assistant, **options).to_dict()
        plain = None
        if bench.temperature > 0:
            plain = bench.assistant(Variant("plain sampler", 0, 0.05), seed=bench.seed or 0)
        runs = [
            self.model.generate(**inputs, **options, **self._own_cache(), **_given(one))
            for one in (plain, assistant)
        ]
        report = compare_tokens(
            self.model, inputs, *runs, assistant=plain, options={**options, **self._own_cache()}
        )
        return report.to_dict()

    def _profile(self, variant: Variant, record: dict[str, Any]) -> dict[str, float]:
        """Return the shares of a run's decode that its phases took; the rest is bookkeeping."""
        runs = record["runs"]
        if self.model.device.type == "cuda":
            # The host runs ahead of the device: a run of its own waits for each phase.
            self.on_run(f"{variant.name}, profile")
            # The same assistant: a new one would record its passes, and a gate try what it knows.
            assistant = self._assistants[variant.name]
            assistant.synchronise = True
            _, times = timed_batch(
                self.model,
                {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids)},
                end_tokens=frozenset(),
                **self._common(self.bench.new_tokens),
                **self._options(variant),
            )
            assistant.synchronise = False
            stats = assistant.stats.to_dict()
            runs = [{f"{phase}_seconds": stats[f"{phase}_seconds"] for phase in PHASES}]
            runs[0]["decode_seconds"] = times.decode_seconds
        total = sum(run["decode_seconds"] for run in runs) or 1.0
        shares = {phase: sum(run[f"{phase}_seconds"] for run in runs) / total for phase in PHASES}
        return {**shares, "rest": max(0.0, 1.0 - sum(shares.values()))}

    def _common(self, new_tokens: int) -> dict[str, Any]:
        bench = self.bench
        options: dict[str, Any] = {
            "max_new_tokens": new_tokens, "do_sample": bench.temperature > 0,
            "eos_token_id": None, "pad_token_id": 0,
        }  # fmt: skip
        if bench.temperature > 0:
            options |= {"temperature": bench.temperature, "top_k": 0, "top_p": 1.0}
        return options

    def _options(self, variant: Variant) -> dict[str, Any]:
        extra: dict[str, Any] = self._own_cache()
        if variant.is_static:
            extra["cache_implementation"] = "static"
        if variant.k is not None:
            extra["assistant"] = self._assistants[variant.name]
        return extra

    def _own_cache(self) -> dict[str, Any]:
        return {} if self._cache is None else {cache_keyword(): copy.deepcopy(self._cache)}

    def _prompt_cache(self) -> Any:
        """Return the cache of all prompt tokens but the last few, computed in chunks."""
        self.on_run("prompt")
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        head = self.ids[:, : max(self.ids.shape[1] - LEFT, 1)]
        options: dict[str, Any] = {cache_keyword(): cache}
        if self.model._supports_logits_to_keep():
            options["logits_to_keep"] = 1
        with torch.no_grad():
            for part in head.split(CHUNK, dim=1):
                self.model(input_ids=part, **options)
        return cache


def prompts(tokenizer: Any, batch: int, length: int, *, shared: bool) -> Tensor:
    """Return `batch` prompts of exactly `length` tokens each, `[B, L]`: worked mathematics."""
    rows = []
    for row in range(1 if shared else batch):
        ids: list[int] = []
        target = length
        while len(ids) < length:
            target += max(length, 512)
            found = tokenizer(worked_maths(target, tokenizer, seed=row))["input_ids"]
            if len(found) <= len(ids):
                found = ids + found
            ids = found
        rows.append(ids[-length:])
    table = torch.tensor(rows)
    return table.repeat(batch, 1) if shared else table


def summarise(record: dict[str, Any]) -> None:
    """Add what tables show: the median speed of decode, and of all, with its spread."""
    runs, tokens = record["runs"], record["decoded_tokens"]
    speeds = [tokens / max(run["decode_seconds"], 1e-9) for run in runs]
    record["decode_tokens_per_second"] = median(speeds)
    record["decode_spread"] = [min(speeds), max(speeds)]
    record["prefill_seconds"] = median(run["prefill_seconds"] for run in runs)
    record["total_seconds"] = median(run["prefill_seconds"] + run["decode_seconds"] for run in runs)


def _given(assistant: Any) -> dict[str, Any]:
    return {} if assistant is None else {"assistant": assistant}


def _reset_peak(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)


def _peak(model: Any) -> int | None:
    if model.device.type != "cuda":
        return None
    return int(torch.cuda.max_memory_allocated(model.device))
