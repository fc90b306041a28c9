"""`bench engine`: the engine plainly and speculatively on one batch of requests, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from pillarattn.config import PillarConfig
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine
from pillarattn.engine.request import SamplingParams
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.generate_bench_cell import prompts
from pillarattn.patch.patching import patch

SCHEMA = 1
KIND, RUN = "engine-bench", "engine-bench-run"
PLAIN = "plain"
# New tokens of a warm-up.
WARM_TOKENS = 64
Record = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One of the engines that are compared.

    Attributes:
        pillar: how drafts are made.
        acceptance: how sampled ones are judged.
        changes: fields of `EngineConfig`.
    """

    pillar: PillarConfig
    acceptance: str
    changes: dict[str, Any]


@dataclass(frozen=True)
class EngineBench:
    """Settings of a bench of the engine.

    Attributes:
        model: "smollm2", a checkpoint folder or a hub name.
        batches: requests that run together.
        length: prompt tokens of each request.
        new_tokens: tokens generated for each, whatever the model says.
        queued: requests that wait behind those of a batch, and come in as others end.
        ks: drafts of a round; each is a speculative engine of its own.
        s, strategy, min_budget: of these.
        temperature: 0 is greedy; above 0 each request has a seed of its own.
        acceptances: how sampled drafts are judged, each with every k: see `SamplingParams`. With
            "gumbel" tokens are compared as greedy ones are.
        synchronous: time it with each pass looked at before the next one begins.
        auto: also time an engine that measures both ways and chooses.
        lockstep: also time the speculative engine with all requests verifying together.
        delayed: also time it with passes that begin before the one before is looked at.
        cruise: also time it with rounds that follow each other on the device, without plans; plain
            decoding cruises in any case.
        repeats: timed runs of each variant.
        warm_ups: runs before those, of the first batch and `WARM_TOKENS` new tokens.
        device, dtype: as `load_model` takes them.

    Raises:
        ValueError: a value is out of range; the message names its option.
    """

    model: str = "smollm2"
    batches: tuple[int, ...] = (8,)
    length: int = 1024
    new_tokens: int = 128
    queued: int = 0
    ks: tuple[int, ...] = (8,)
    s: float = 0.05
    strategy: str = "pillar"
    min_budget: int = 128
    temperature: float = 0.6
    acceptances: tuple[str, ...] = ("gumbel",)
    synchronous: bool = True
    auto: bool = True
    lockstep: bool = True
    delayed: bool = True
    cruise: bool = True
    repeats: int = 3
    warm_ups: int = 1
    device: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--batch", min(self.batches, default=0), 1), ("--length", self.length, 1),
            ("--new-tokens", self.new_tokens, 2), ("--queued", self.queued, 0),
            ("--k", min(self.ks, default=0), 1), ("--acceptance", len(self.acceptances), 1),
            ("--repeats", self.repeats, 1), ("--warm-ups", self.warm_ups, 0),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{option} must be at least {least}, got {value}")
        for variant in self.variants.values():
            self.params(0, variant)

    @property
    def variants(self) -> dict[str, Variant]:
        """Return what is compared, by name."""
        found = {PLAIN: Variant(self._pillar(self.ks[0]), "gumbel", {"speculative": False})}
        ways: dict[str, dict[str, Any]] = {}
        if self.synchronous:
            ways[""] = {"delayed_verification": False}
        if self.lockstep:
            ways[" lockstep"] = {"phases": "lockstep", "delayed_verification": False}
        if self.delayed:
            ways[" delayed"] = {"cruise": False}
        if self.cruise:
            ways[" cruise"] = {"cruise": True}
        if self.auto:
            ahead = self.delayed or self.cruise
            ways[" auto"] = {"speculative": "auto", "delayed_verification": ahead}
        rules = self.acceptances if self.temperature > 0 else ("gumbel",)
        for k in self.ks:
            for rule in rules:
                name = f"k={k} s={self.s:g}" + (f" {rule}" if rule != "gumbel" else "")
                for way, changes in ways.items():
                    found[name + way] = Variant(self._pillar(k), rule, changes)
        return found

    @property
    def warm_tokens(self) -> int:
        """New tokens of a warm-up: kernels are compiled by then."""
        return min(self.new_tokens, WARM_TOKENS)

    def params(self, index: int, variant: Variant) -> SamplingParams:
        """Return how the request `index` is decoded."""
        return SamplingParams(
            max_tokens=self.new_tokens, temperature=self.temperature, ignore_eos=True, seed=index,
            acceptance=variant.acceptance if self.temperature > 0 else None,
        )  # fmt: skip

    def engine(self, model: Any, batch: int, variant: Variant) -> Engine:
        """Return an engine with room for all requests at their full length."""
        room = -(-(self.length + self.new_tokens + max(self.ks) + 1) // 16) * 16
        config = EngineConfig(
            kv_tokens=batch * room, max_batch=batch, prefill_chunk=max(8192, 32 * batch),
            pillar=variant.pillar, prefix_cache=False, seed=1, **variant.changes,
        )  # fmt: skip
        return Engine(model, config)

    def _pillar(self, k: int) -> PillarConfig:
        return PillarConfig(k=k, s=self.s, strategy=self.strategy, min_budget=self.min_budget)


def run_engine_bench(
    bench: EngineBench, *, on_run: Callable[[int, str], None] = lambda batch, name: None,
    on_done: Callable[[Record], None] = lambda run: None,
) -> list[Record]:  # fmt: skip
    """Return one record a batch size: every variant's tokens a second, and its speed-up.

    Args:
        bench: what to time.
        on_run: told of each run that begins.
        on_done: given a record of each timed run that has ended: what is interrupted later keeps
            those.
    """
    model, tokenizer = load_model(bench.model, device=bench.device, dtype=bench.dtype)
    patch(model, join_weights=model.device.type == "cuda")
    return [_cell(bench, model, tokenizer, batch, on_run, on_done) for batch in bench.batches]


def _cell(
    bench: EngineBench, model: Any, tokenizer: Any, batch: int, on_run: Callable[[int, str], None],
    on_done: Callable[[Record], None],
) -> Record:  # fmt: skip
    about = {
        "schema": SCHEMA, "batch": batch, "settings": asdict(bench),
        "environment": environment(model.device), "commit": source_commit(),
    }  # fmt: skip
    count = batch + bench.queued
    texts = prompts(tokenizer, count, bench.length, shared=False).tolist()
    variants: dict[str, Record] = {name: {"runs": []} for name in bench.variants}
    tokens: dict[str, list[list[int]]] = {}
    for repeat in range(1 - bench.warm_ups, bench.repeats + 1):
        for name, variant in bench.variants.items():
            on_run(batch, f"{name}, {'warm-up' if repeat < 1 else f'run {repeat}'}")
            engine = bench.engine(model, batch, variant)
            params = [bench.params(i, variant) for i in range(count)]
            if repeat < 1:
                params = [replace(one, max_tokens=bench.warm_tokens) for one in params[:batch]]
            tokens[name], run = timed_requests(engine, texts[: len(params)], params, batch)
            del engine
            if repeat > 0:
                variants[name]["runs"].append(run)
                on_done({"kind": RUN, "variant": name, "repeat": repeat, "run": run, **about})
    for name, found in variants.items():
        speeds = [run["tokens"] / run["seconds"] for run in found["runs"]]
        found["tokens_per_second"] = median(speeds)
        found["spread"] = [min(speeds), max(speeds)]
        found["all_tokens_per_second"] = median(
            run["all"]["tokens"] / max(run["all"]["seconds"], 1e-9) for run in found["runs"]
        )
        found |= _compared(bench.variants[name], tokens[name], tokens[PLAIN])
    for found in variants.values():
        found["speedup"] = found["tokens_per_second"] / variants[PLAIN]["tokens_per_second"]
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"kind": KIND, "started_at": started_at, **about, "variants": variants}


def _compared(variant: Variant, tokens: list[list[int]], plain: list[list[int]]) -> Record:
    """Return how a variant's tokens agree with plain decoding's; None each where they need not.

    "same_tokens" is whether all do, "different_requests" how many requests end otherwise, and
    "tokens_alike" the tokens of all requests before their first difference.
    """
    if variant.acceptance != "gumbel":
        return {"same_tokens": None, "different_requests": None, "tokens_alike": None}
    alike = [
        next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
        for one, other in zip(tokens, plain, strict=True)
    ]
    return {
        "same_tokens": tokens == plain,
        "different_requests": sum(a != b for a, b in zip(tokens, plain, strict=True)),
        "tokens_alike": sum(alike),
    }


def timed_requests(
    engine: Engine, texts: list[list[int]], params: list[SamplingParams], batch: int
) -> tuple[list[list[int]], Record]:
    """Return the tokens of all requests, and the time of what follows the first batch's prompts.

    A batch that gets no new requests thins out, since acceptance differs from text to text: "all"
    is what comes before fewer than `batch` are left, prompts of those that waited included.
    """
    engine.reset_stats()
    names = [engine.add_request(*one) for one in zip(texts, params, strict=True)]
    waiting, outputs = set(names[:batch]), {}
    begun, decoded, steps = time.perf_counter(), 0, 0
    everybody: Record | None = None
    while engine.has_unfinished:
        reads = bool(waiting)
        for output in engine.step():
            waiting.discard(output.request_id)
            decoded += len(output.new_token_ids)
            if output.finish_reason is not None:
                outputs[output.request_id] = list(output.token_ids)
        steps += 1
        if len(names) - len(outputs) < batch and everybody is None:
            everybody = {"seconds": time.perf_counter() - begun, "tokens": decoded, "steps": steps}
        if reads:
            _wait(engine)
            # From then on, unless somebody has waited, every step decodes.
            begun, decoded, steps = time.perf_counter(), 0, 0
    _wait(engine)
    stats = engine.stats
    return [outputs[name] for name in names], {
        "seconds": max(time.perf_counter() - begun, 1e-9),
        "tokens": decoded,
        "steps": steps,
        "mean_accepted": stats.mean_accepted,
        "rounds": stats.rounds,
        "all": everybody,
    }


def _wait(engine: Engine) -> None:
    device = engine.runner.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
