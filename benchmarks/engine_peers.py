"""The engine beside what transformers has for batches: `generate`, and `generate_batch`.

    python -m benchmarks.engine_peers --device cuda --dtype bfloat16 --batch 64 --length 4096 \\
        --new-tokens 256 --out engine_peers.jsonl

Every variant decodes the same prompts greedily, to the same number of tokens, in one process:

    dynamic      the model's own `generate`
    static       the same with `cache_implementation="static"`, which transformers compiles on a GPU
    batching     the model's own `generate_batch`, transformers' continuous batching
    plain        the engine without drafts
    speculative  the engine with drafts

Tokens are compared with `generate`'s before anything is timed. In fp32 they must be equal; in half
precision records say how many requests differ. What a peer cannot do is recorded in its own words.
A host that runs a model eagerly may vary threefold from one run to the next.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig

import pillarattn
from benchmarks.shape_cells import measure_variants, split_variants
from pillarattn.evaluation.batch_timing import timed_batch
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.generate_bench_cell import prompts
from pillarattn.evaluation.results import append_record

SCHEMA = 1
KIND = "engine-peers"
DYNAMIC, STATIC, BATCHING, PLAIN, SPECULATIVE = VARIANTS = (
    "dynamic", "static", "batching", "plain", "speculative",
)  # fmt: skip
# Tokens of a block of transformers' paged cache.
BLOCK = 256
Record = dict[str, Any]
Tokens = list[list[int]]


class PeerCell:
    """Prompts of one length, decoded by each variant.

    Args:
        given: options of the command.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.model, tokenizer = load_model(given.model, device=given.device, dtype=given.dtype)
        self.ids = prompts(tokenizer, given.batch, given.length, shared=False)
        # Tokens of the variant that came first, which has the model's own code.
        self.expected: Tokens | None = None

    def measure(self, name: str) -> Record:
        """Return the figures of a variant, after a run that warms it up.

        Raises:
            ValueError: its fp32 tokens are not those of the first variant.
        """
        run = self._runner(name)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.model.device)
        tokens, _ = run()
        found = self._compared(name, tokens)
        runs = [run()[1] for _ in range(self.given.repeats)]
        for kind in ("decode", "whole"):
            speeds = [one[f"{kind}_tokens"] / max(one[f"{kind}_seconds"], 1e-9) for one in runs]
            found[f"{kind}_tokens_per_second"] = median(speeds)
            found[f"{kind}_spread"] = [min(speeds), max(speeds)]
        is_cuda = self.model.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.model.device) if is_cuda else None
        return {**found, "runs": runs, "peak_bytes": peak}

    def _compared(self, name: str, tokens: Tokens) -> Record:
        if self.expected is None:
            self.expected = tokens
        different = sum(a != b for a, b in zip(tokens, self.expected, strict=True))
        if different and self.given.dtype == "float32":
            raise ValueError(f"{different} of {len(tokens)} requests differ from the first variant")
        return {"different_requests": different}

    def _runner(self, name: str) -> Callable[[], tuple[Tokens, Record]]:
        if name in (DYNAMIC, STATIC):
            return lambda: self._generate(static=name == STATIC)
        if name == BATCHING:
            # It gives the model another attention.
            model = deepcopy(self.model)
            return lambda: self._generate_batch(model)
        return lambda: self._engine(speculative=name == SPECULATIVE)

    def _generate(self, *, static: bool) -> tuple[Tokens, Record]:
        ids = self.ids.to(self.model.device)
        extra = {"cache_implementation": "static"} if static else {}
        sequences, times = timed_batch(
            self.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            end_tokens=frozenset(), max_new_tokens=self.given.new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0, **extra,
        )  # fmt: skip
        return sequences[:, ids.shape[1] :].tolist(), _figures(
            self.given, times.total_seconds, times.decoded_tokens, times.decode_seconds
        )

    def _generate_batch(self, model: Any) -> tuple[Tokens, Record]:
        config = GenerationConfig(
            max_new_tokens=self.given.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        sizes = None
        if model.device.type == "cpu":
            # By itself it takes nine tenths of the memory.
            blocks = self.given.batch * (2 + (self.given.length + self.given.new_tokens) // BLOCK)
            sizes = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=2048)
        begun = time.perf_counter()
        found = model.generate_batch(
            inputs=self.ids.tolist(), generation_config=config, record_timestamps=True,
            continuous_batching_config=sizes,
        )  # fmt: skip
        whole = time.perf_counter() - begun
        failed = [one.error for one in found.values() if one.error is not None]
        if failed or len(found) != len(self.ids):
            raise RuntimeError(f"{len(found)} of {len(self.ids)} requests came back: {failed[:1]}")
        outputs = list(found.values())
        times = [one.timestamps for one in outputs]
        # As elsewhere, what follows the last prompt.
        first, last = max(one[0] for one in times), max(one[-1] for one in times)
        decoded = sum(stamp > first for one in times for stamp in one)
        tokens = [list(map(int, one.generated_tokens)) for one in outputs]
        return tokens, _figures(self.given, whole, decoded, last - first)

    def _engine(self, *, speculative: bool) -> tuple[Tokens, Record]:
        given = self.given
        pillarattn.patch(self.model, join_weights=self.model.device.type == "cuda")
        try:
            room = -(-(given.length + given.new_tokens + given.k + 1) // 16) * 16
            config = pillarattn.EngineConfig(
                kv_tokens=given.batch * room, max_batch=given.batch, speculative=speculative,
                prefill_chunk=max(2048, 32 * given.batch), prefix_cache=False,
                pillar=pillarattn.PillarConfig(k=given.k, s=given.s),
            )  # fmt: skip
            engine = pillarattn.Engine(self.model, config)
            params = pillarattn.SamplingParams(
                max_tokens=given.new_tokens, temperature=0.0, ignore_eos=True
            )
            return _steps(given, engine, self.ids.tolist(), params)
        finally:
            pillarattn.unpatch(self.model)


def _steps(
    given: argparse.Namespace, engine: Any, texts: Tokens, params: Any
) -> tuple[Tokens, Record]:
    """Run an engine to its end."""
    begun = time.perf_counter()
    names = [engine.add_request(text, params) for text in texts]
    waiting, outputs, decoded, first = set(names), dict[str, list[int]](), 0, begun
    while engine.has_unfinished:
        reads = bool(waiting)
        for output in engine.step():
            waiting.discard(output.request_id)
            decoded += len(output.new_token_ids)
            if output.finish_reason is not None:
                outputs[output.request_id] = list(output.token_ids)
        if reads:
            _wait(engine)
            first, decoded = time.perf_counter(), 0
    _wait(engine)
    end = time.perf_counter()
    return [outputs[name] for name in names], _figures(given, end - begun, decoded, end - first)


def _figures(given: argparse.Namespace, whole: float, decoded: int, seconds: float) -> Record:
    return {
        "whole_seconds": whole, "whole_tokens": given.batch * given.new_tokens,
        "decode_seconds": seconds, "decode_tokens": decoded,
    }  # fmt: skip


def _wait(engine: Any) -> None:
    if engine.runner.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.device)


def table(done: dict[str, Record]) -> Table:
    """Return what each variant reached, and the engine's plain mode over it."""
    found = Table(
        "variant", "decode tokens/s", "spread", "whole tokens/s", "engine plain / it", "differ"
    )
    plain = done.get(PLAIN)
    for name, one in done.items():
        low, high = one["decode_spread"]
        ratio = plain["decode_tokens_per_second"] / one["decode_tokens_per_second"] if plain else 0
        found.add_row(
            name, f"{one['decode_tokens_per_second']:,.0f}", f"{low:,.0f}..{high:,.0f}",
            f"{one['whole_tokens_per_second']:,.0f}", f"{ratio:.2f}x" if plain else "",
            str(one["different_requests"]),
        )  # fmt: skip
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, or a hub name")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens of each request")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, and in what order")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, after one to warm up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, help="JSON Lines to append to")
    given = parser.parse_args(arguments)
    for option, least in (("batch", 1), ("length", 1), ("new_tokens", 2), ("repeats", 1), ("k", 1)):
        if getattr(given, option) < least:
            name = option.replace("_", "-")
            parser.error(f"--{name} must be at least {least}, got {getattr(given, option)}")
    split_variants(parser, given, VARIANTS)
    return given


def main() -> None:
    given = parsed()
    cell = PeerCell(given)
    about = {
        "kind": KIND, "schema": SCHEMA, "settings": {**vars(given), "out": None},
        "environment": environment(cell.model.device), "commit": source_commit(),
    }  # fmt: skip

    def write(record: Record) -> None:
        if given.out:
            append_record(given.out, record)
        for word in ("error", "skipped"):
            if word in record:
                print(f"{record['variant']}: {record[word]}", flush=True)

    done, _ = measure_variants(
        given.variants, header=lambda name: {**about, "variant": name}, measure=cell.measure,
        write=write,
    )  # fmt: skip
    Console().print(table(done))
    ours = {PLAIN, SPECULATIVE} & set(given.variants)
    if not ours <= set(done):
        raise SystemExit("the engine failed or differs; its record says why")


if __name__ == "__main__":
    main()
