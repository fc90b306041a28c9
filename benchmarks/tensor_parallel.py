"""Tensor parallelism by transformers' own plan: plain and speculative, measured and predicted.

    NCCL_NVLS_ENABLE=0 torchrun --standalone --nproc-per-node 2 -m benchmarks.tensor_parallel \\
        --out benchmarks/results/tensor_parallel_h200x2.jsonl

First a small model in strict fp32 must give the tokens of one device on every rank. Then models of
known shapes with random weights decode from caches of random keys, plainly (k = 0, the same loop,
cache and kernels) and speculatively, in the same process; acceptance is replayed, see
`replayed_acceptance`. Every cell is timed twice: rounds as the library runs them, where eager
layers keep the host busy, and each pass as a CUDA graph (`captured_passes`). `--tiny` runs all of
it on a CPU over gloo.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import transformers

import pillarattn
from benchmarks.captured_passes import captured_passes
from benchmarks.rank_model import (
    config_of,
    load_on_ranks,
    local_kv_heads,
    random_cache,
    release,
    same_on_all,
    save_stub,
    start_ranks,
)
from benchmarks.replayed_acceptance import ReplayedGenerator
from benchmarks.small_equality import check_equality
from pillarattn.datatypes import RowLengths
from pillarattn.evaluation.environment import environment, machine, source_commit
from pillarattn.patch.compat import cache_keyword
from pillarattn.theory import (
    Link,
    Workload,
    efficiency_named,
    expect_on_ranks,
    hardware_named,
    link_named,
    shape_from_config,
    shard,
)
from pillarattn.theory.known_models import KNOWN_MODELS

# New tokens of the prompt, the last of each row's context; they choose the first round's keys.
PROMPT = 16
# Free memory that a cell must leave for logits, scores of a layer and the allocator, in bytes.
MARGIN = 6e9


def arguments_of() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="Qwen3-8B,Llama-3.1-8B")
    parser.add_argument("--batches", default="16,64")
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--strategy", default="pillar")
    parser.add_argument("--rate", type=float, default=0.77, help="replayed acceptance")
    parser.add_argument("--rounds", type=int, default=10, help="rounds timed in each repetition")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=540, help="start no cell after so long")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-equality", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run on every rank; the first one writes."""
    begun = time.perf_counter()
    options = arguments_of()
    # Weights are missing from the checkpoint on purpose.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rank, ranks, device = start_ranks()
    out = None
    if rank == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        out = options.out.open("a")

    def write(record: dict[str, Any]) -> None:
        if out is not None:
            record = {**record, "ranks": ranks, "elapsed": round(time.perf_counter() - begun, 1)}
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(json.dumps(record), flush=True)

    write(
        {
            "kind": "tensor_parallel_environment",
            "environment": environment(device),
            "machine": machine(),
            "commit": source_commit(),
            "backend": dist.get_backend(),
            "options": {k: str(v) for k, v in vars(options).items()},
        }
    )
    with _shared_folder() as folder:
        if not options.no_equality:
            for name in options.models.split(","):
                for record in check_equality(name, folder / f"small-{name}", device):
                    write(record)
                release()
        link = measured_link(device, ranks)
        write({"kind": "tensor_parallel_link", **vars(link)})
        for name in options.models.split(","):
            for record in cells(name, options, folder, device, ranks, link, begun):
                write(record)
            release()
    dist.barrier()
    dist.destroy_process_group()


def cells(
    name: str,
    options: argparse.Namespace,
    folder: Path,
    device: torch.device,
    ranks: int,
    link: Link,
    begun: float,
) -> Iterator[dict[str, Any]]:
    """Yield one record for each batch and length of a model."""
    dtype = torch.float32 if options.tiny else torch.bfloat16
    config = config_of(name, tiny=options.tiny)
    if dist.get_rank() == 0:
        save_stub(config, folder / name, dtype)
    dist.barrier()
    model = pillarattn.patch(load_on_ranks(folder / name, dtype))
    lengths = [int(n) for n in options.lengths.split(",")]
    for batch in (int(n) for n in options.batches.split(",")):
        for length in lengths:
            base = {
                "kind": "tensor_parallel",
                "model": name,
                "weights": "random",
                "acceptance": "replayed",
                "dtype": str(dtype).removeprefix("torch."),
                "batch": batch,
                "length": length,
                "k": options.k,
                "s": options.s,
                "strategy": options.strategy,
                "kv_heads_per_rank": local_kv_heads(model),
                # Not None: drafts were no sparse ones, and the cell says nothing about them.
                "dense_reason": model.pillarattn_record.dense_reason,
            }
            need = needed_bytes(name, batch, length, ranks, options.k)
            free = float("inf") if device.type == "cpu" else torch.cuda.mem_get_info()[0]
            late = time.perf_counter() - begun > options.seconds
            # The slowest rank's clock and the fullest memory decide for all.
            skip = torch.tensor([int(late), int(need > free)], device=device)
            dist.all_reduce(skip, op=dist.ReduceOp.MAX)
            if bool(skip.any()):
                why = "out of time" if skip[0] else f"needs {need / 1e9:.0f} GB a rank"
                yield {**base, "skipped": why}
                continue
            yield {**base, **cell(model, name, batch, length, options, link)}
            release()


def needed_bytes(name: str, batch: int, length: int, ranks: int, k: int) -> float:
    """Return what a cell allocates on a rank beside the weights, in bytes."""
    part = shard(shape_from_config(KNOWN_MODELS[name]), ranks)
    heads = sum(layer.kv_heads for layer in part.layers)
    # Row scores of a verify pass, fp32, and a copy while they are pooled.
    scores = 2 * batch * heads * (k + 1) * length * 4
    return batch * part.cache_bytes(length + 256) + scores + MARGIN


def cell(
    model: Any, name: str, batch: int, length: int, options: argparse.Namespace, link: Link
) -> dict[str, Any]:
    """Measure one cell, plain and speculative over one cache."""
    new = options.rounds * (options.k + 1) + 2
    past = length - PROMPT
    cache = random_cache(model, batch=batch, tokens=past, room=PROMPT + new + options.k + 2)
    ids = torch.randint(1, model.config.vocab_size, (batch, PROMPT), device=model.device,
                        generator=torch.Generator(model.device).manual_seed(1))  # fmt: skip
    plain = ReplayedGenerator(0.0, k=0)
    sparse = ReplayedGenerator(options.rate, k=options.k, s=options.s, strategy=options.strategy)
    steps: list[float] = []
    rounds: list[float] = []
    parts: list[dict[str, float]] = []
    identical, emitted = True, 0.0
    # The first repetition compiles kernels, and does not count.
    for repetition in range(options.repetitions + 1):
        for assistant, times in ((plain, steps), (sparse, rounds)):
            count = options.rounds if assistant is sparse else options.rounds + 1
            dist.barrier()
            tokens = generate(model, cache, ids, assistant, new if assistant is sparse else count)
            identical &= same_on_all(tokens)
            cache.roll_back(RowLengths([past] * batch, model.device))
            if repetition:
                stamps = assistant.stamps
                times += [1000 * (b - a) for a, b in pairwise(stamps)][:count]
        if repetition:
            stats = sparse.stats
            # While all rows run on; at the end some wait for others.
            firsts = [row[: options.rounds] for row in stats.accepted_per_round]
            emitted = 1 + mean(accepted for row in firsts for accepted in row)
            parts.append(
                {
                    "draft_ms": 1000 * stats.draft_seconds / stats.rounds * batch,
                    "verify_ms": 1000 * stats.verify_seconds / stats.rounds * batch,
                    "select_ms": 1000 * stats.select_seconds / stats.rounds * batch,
                }
            )
    found: dict[str, Any] = {
        "ranks_identical": identical,
        "emitted_per_round": emitted,
        "plain_step_ms": spread(steps),
        "round_ms": spread(rounds),
        "speedup": median(steps) * emitted / median(rounds),
        "tokens_per_second": batch * emitted / median(rounds) * 1000,
        "plain_tokens_per_second": batch / median(steps) * 1000,
        "host_parts": parts,
    }
    if not options.no_graphs:
        found["captured"] = captured(model, cache, sparse, ids, emitted)
    found["predicted"] = predicted(name, batch, length, options, link, emitted - 1)
    return found


def generate(
    model: Any, cache: Any, ids: torch.Tensor, assistant: ReplayedGenerator, new: int
) -> torch.Tensor:
    """Decode from a filled cache; return the tokens."""
    mask = torch.ones(ids.shape[0], cache.lengths.max + ids.shape[1], dtype=torch.int64,
                      device=ids.device)  # fmt: skip
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        assistant=assistant,
        **{cache_keyword(): cache},
    )


def captured(
    model: Any, cache: Any, assistant: ReplayedGenerator, ids: torch.Tensor, emitted: float
) -> dict[str, Any]:
    """Return the passes as CUDA graphs, and the speed-up that they add up to."""
    try:
        passes = captured_passes(model, cache, assistant, ids)
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    middle = {name: times["median"] for name, times in passes.items()}
    spent = assistant.config.k * middle["draft_step"] + middle["verify_pass"] + middle["select"]
    return {
        "ms": passes,
        "round_ms": spent,
        "speedup": middle["plain_step"] * emitted / spent,
        "speedup_without_selection": middle["plain_step"] * emitted / (spent - middle["select"]),
    }


def predicted(
    name: str,
    batch: int,
    length: int,
    options: argparse.Namespace,
    measured: Link,
    accepted: float,
) -> dict[str, Any]:
    """Return what theory says of the full-size model on these ranks, by efficiency and link."""
    found = {}
    for efficiency in ("ideal", "kernels", "hf-graph"):
        for link in (link_named("none"), link_named("NVLink-4"), measured):
            workload = Workload(
                shape_from_config(KNOWN_MODELS[name]),
                hardware_named("H200-measured"),
                batch,
                length,
                efficiency=efficiency_named(efficiency),
                scores="rows",
            )
            one = expect_on_ranks(
                workload,
                ranks=dist.get_world_size(),
                link=link,
                k=options.k,
                s=options.s,
                accepted=accepted,
            )
            found[f"{efficiency}, {link.name}"] = {
                "plain_step_ms": 1000 * one.plain_seconds,
                "round_ms": 1000 * one.round_seconds,
                "speedup": one.speedup,
                "communication_share": one.round_communication / one.round_seconds,
            }
    return found


def measured_link(device: torch.device, ranks: int, repeats: int = 20) -> Link:
    """Return the link that sums of few and of many bytes see, outside of graphs."""
    times = []
    for size in (8192 * 16, 2**28 if device.type == "cuda" else 2**20):
        values = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        for number in range(repeats + 5):
            if number == 5:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                begun = time.perf_counter()
            dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / repeats)
    moved = 2 * values.numel() * 2 * (ranks - 1) / ranks
    bandwidth = moved / max(times[1] - times[0], 1e-9)
    both = torch.tensor([bandwidth, times[0]], dtype=torch.float64, device=device)
    # The prediction must be the same in the record whichever rank is asked.
    dist.broadcast(both, src=0)
    return Link("measured", float(both[0]), float(both[1]), "all_reduce of 128 KB and 256 MB")


def spread(times: list[float]) -> dict[str, float]:
    """Return the middle and the spread of some times."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return {
        "median": median(ordered),
        "p10": ordered[tenth],
        "p90": ordered[-1 - tenth],
        "n": len(ordered),
    }


class _shared_folder:
    """A scratch folder that the first rank makes and removes, known to all."""

    def __enter__(self) -> Path:
        self._own = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
        name = [self._own.name if self._own else ""]
        dist.broadcast_object_list(name, src=0)
        return Path(name[0])

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            with suppress(OSError):
                self._own.cleanup()


if __name__ == "__main__":
    main()
