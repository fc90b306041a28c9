"""The engine in a pool that is too small: reservation, and every eviction policy.

    python -m benchmarks.engine_offload --device cuda --dtype bfloat16 --requests 256 --batch 128 \\
        --length 140 --mean-new 1500 --longest 4096 --out engine_offload.jsonl

All requests wait at the start; their outputs have log-normal lengths, as in the simulator
(`pillarattn.engine.simulator`). They are decoded greedily, once in each of these ways:

    room           a pool with room for everybody: nothing ever leaves
    reserve        the small pool; a request comes in when the longest output would fit
    reserve_known  the same, told in advance how long each output will be
    recompute      the small pool and no memory on the host: the last one is dropped, computed again
    fifo ... heat  the small pool, with each eviction policy

The tokens of every run are compared with the first way's, which is `room` unless it is left out,
before a figure of it is told. In fp32 they must be equal; in half precision records say how many
requests differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import pillarattn
from benchmarks.offload_run import Record, Tokens, UnevenRequests, run_requests
from benchmarks.shape_cells import measure_variants, split_variants
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.workload import Workload
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.generate_bench_cell import prompts
from pillarattn.evaluation.results import append_record

KIND, FACTORS, SCHEMA = "engine-offload", "engine-offload-factors", 1
ROOM, RESERVE, KNOWN, RECOMPUTE = "room", "reserve", "reserve_known", "recompute"
VARIANTS = (ROOM, RESERVE, KNOWN, RECOMPUTE, *EVICTION_POLICIES.names())
# What the paper's ablation gives its dynamic KV manager, with other models, lengths and devices.
PAPER = 1.61
BLOCK = 16


class OffloadCell:
    """One workload, run in each way.

    Args:
        given: options of the command.

    Attributes:
        pool_tokens: that the small pool holds.

    Raises:
        ValueError: the small pool could not hold the longest request alone.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        work = Workload(
            requests=given.requests, prompt=given.length, mean=given.mean_new,
            deviation=given.deviation * given.mean_new, max_tokens=given.longest,
            max_batch=given.batch, k=given.k, s=given.s, chunk=given.chunk, seed=given.seed,
        )  # fmt: skip
        lengths = work.lengths()
        # What as many as run at a time come to at their ends, on average.
        mean = sum(map(self._room, lengths)) / len(lengths)
        need, alone = mean * min(given.batch, given.requests), self._room(given.longest)
        self.pool_tokens = int(given.pool * need) // BLOCK * BLOCK
        if self.pool_tokens < alone:
            raise ValueError(
                f"--pool {given.pool:g} gives {self.pool_tokens} tokens, and the longest request "
                f"alone takes {alone}: raise --pool to {alone / need + 0.01:.2f} or lower --longest"
            )
        self.model, tokenizer = load_model(given.model, device=given.device, dtype=given.dtype)
        texts = prompts(tokenizer, given.requests, given.length, shared=False).tolist()
        self.requests = UnevenRequests(texts, lengths, given.longest)
        # Tokens of the variant that came first, under no pressure unless it was left out.
        self.expected: Tokens | None = None

    def measure(self, name: str) -> Record:
        """Return the figures of a variant, whose tokens are compared in every run.

        Raises:
            ValueError: its fp32 tokens are not those of the first variant.
        """
        pillarattn.patch(self.model, join_weights=self.model.device.type == "cuda")
        try:
            runs, different = self._runs(name)
        finally:
            # By then the engine's pool is gone: weights that come apart need room.
            pillarattn.unpatch(self.model)
        runs = runs[self.given.warm_ups :]
        speeds = [run["tokens_per_second"] for run in runs]
        return {
            "different_requests": different, "kv_tokens": self.config_of(name).kv_tokens,
            **{figure: median(run[figure] for run in runs) for figure in runs[0]},
            "spread": [min(speeds), max(speeds)], "runs": runs,
        }  # fmt: skip

    def _runs(self, name: str) -> tuple[list[Record], int]:
        """Return a variant's runs, warm-ups first, and how many requests ended otherwise."""
        engine = pillarattn.Engine(self.model, self.config_of(name))
        runs, different = [], 0
        for _ in range(self.given.warm_ups + self.given.repeats):
            tokens, run = run_requests(engine, self.requests, is_known=name == KNOWN)
            different = max(different, self._different(tokens))
            runs.append(run)
        return runs, different

    def config_of(self, name: str) -> pillarattn.EngineConfig:
        """Return a variant's engine."""
        given = self.given
        everybody = min(given.batch, given.requests) * self._room(given.longest)
        policy = name if name in EVICTION_POLICIES.names() else "lifo"
        return pillarattn.EngineConfig(
            kv_tokens=everybody if name == ROOM else self.pool_tokens,
            host_tokens=everybody if name in EVICTION_POLICIES.names() else 0,
            block_size=BLOCK, max_batch=given.batch, prefill_chunk=given.prefill_chunk,
            admission="reserve" if name in (RESERVE, KNOWN) else "optimistic", eviction=policy,
            offload_chunk=given.chunk, prefix_cache=False, seed=given.seed,
            pillar=pillarattn.PillarConfig(k=given.k, s=given.s, min_budget=given.min_budget),
        )  # fmt: skip

    def _room(self, new: int) -> int:
        """Return what a request takes at its end, in whole blocks, with a round before it."""
        blocks = -(-(self.given.length + new) // BLOCK) + -(-(self.given.k + 1) // BLOCK)
        return blocks * BLOCK

    def _different(self, tokens: Tokens) -> int:
        """Return how many requests have other tokens than under the first variant."""
        if self.expected is None:
            self.expected = tokens
        different = sum(a != b for a, b in zip(tokens, self.expected, strict=True))
        if different and self.given.dtype == "float32":
            raise ValueError(f"{different} of {len(tokens)} requests differ from the first variant")
        return different


def factors(done: dict[str, Record]) -> dict[str, float]:
    """Return the speed of each variant over that of reservation, and of lifo."""
    return {
        f"{name} / {base}": one["tokens_per_second"] / done[base]["tokens_per_second"]
        for base in (RESERVE, "lifo")
        if base in done
        for name, one in done.items()
        if name != base
    }


def table(done: dict[str, Record]) -> Table:
    """Return what each variant reached and moved."""
    found = Table(
        "variant", "tok/s", "/ reserve", "/ lifo", "steps", "stalled", "out MB", "evicted",
        "again", "accepted", "differ", box=SIMPLE, padding=0,
        caption="stalled: request-steps; again: tokens computed again. The paper's dynamic KV "
        f"manager, beside heat / reserve: {PAPER}x, with other models, lengths and devices",
    )  # fmt: skip
    ratios = factors(done)
    for name, one in done.items():
        over = [ratios.get(f"{name} / {base}") for base in (RESERVE, "lifo")]
        found.add_row(
            name, f"{one['tokens_per_second']:,.1f}",
            *("" if ratio is None else f"{ratio:.2f}x" for ratio in over),
            f"{one['steps']:,}", f"{one['stalled_steps']:,}", f"{one['bytes_out'] / 1e6:,.1f}",
            f"{one['evictions']:,}", f"{one['recomputed_tokens']:,}",
            f"{one['mean_accepted']:.2f}", str(one["different_requests"]),
        )  # fmt: skip
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, or a hub name")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, help="that run at a time; left out: all of them")
    parser.add_argument("--length", type=int, default=140, help="prompt tokens of each request")
    parser.add_argument("--mean-new", type=float, default=300, help="mean of the output lengths")
    parser.add_argument("--deviation", type=float, default=0.6, help="of them, over the mean")
    parser.add_argument("--longest", type=int, default=819, help="tokens where outputs are cut")
    parser.add_argument("--pool", type=float, default=0.5, help="share of the need that fits")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens that move at a time")
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, and in what order")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--min-budget", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="timed runs")
    parser.add_argument("--warm-ups", type=int, default=1, help="runs before them")
    parser.add_argument("--seed", type=int, default=0, help="of the output lengths")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, help="JSON Lines to append to")
    given = parser.parse_args(arguments)
    given.batch = given.requests if given.batch is None else given.batch
    for option, least in (
        ("requests", 1), ("batch", 1), ("length", 1), ("mean_new", 1), ("longest", 1),
        ("chunk", 1), ("prefill_chunk", 1), ("k", 1), ("min_budget", 1), ("repeats", 1),
        ("warm_ups", 0),
    ):  # fmt: skip
        if getattr(given, option) < least:
            name = option.replace("_", "-")
            parser.error(f"--{name} must be at least {least}, got {getattr(given, option)}")
    for option in ("pool", "deviation"):
        if not 0 < getattr(given, option) < float("inf"):
            parser.error(f"--{option} must be above 0, got {getattr(given, option)}")
    split_variants(parser, given, VARIANTS)
    return given


def main() -> None:
    given = parsed()
    try:
        cell = OffloadCell(given)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    about = {
        "schema": SCHEMA, "settings": {**vars(given), "out": None},
        "environment": environment(cell.model.device), "commit": source_commit(),
    }  # fmt: skip

    def write(record: Record) -> None:
        if given.out:
            append_record(given.out, record)
        said = record.get("error") or record.get("skipped") or "done"
        print(f"{record['variant']}: {said}, {record['seconds']:.0f} s", flush=True)

    done, is_right = measure_variants(
        given.variants, header=lambda name: {"kind": KIND, **about, "variant": name},
        measure=cell.measure, write=write,
    )  # fmt: skip
    if given.out and done:
        found: dict[str, Any] = {"kind": FACTORS, **about, "paper": PAPER, "factors": factors(done)}
        append_record(given.out, found)
    Console().print(table(done))
    if not is_right:
        raise SystemExit("some variants failed or differ; their records say why")


if __name__ == "__main__":
    main()
