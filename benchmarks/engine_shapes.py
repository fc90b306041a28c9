"""The engine at named model shapes: plain, speculative, and beside compiled plain decoding.

    python -m benchmarks.engine_shapes --shape 8b --batch 32 --length 16384 --out engine_8b.jsonl

Weights are random, prompts are random keys and values, and acceptance is replayed at a given rate:
records say so. Times of steps are real. Each variant's record is written as soon as it is done, and
after the last one of a cell a record of their ratios. `--batch` and `--length` take lists with
commas, every pair of which is a cell; what does not fit the memory is named and left out.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch

import pillarattn
from benchmarks.replayed_engine import SteadyEngine
from benchmarks.shape_cells import integers, measure_variants, split_variants, write_record
from benchmarks.shape_limits import (
    BASELINE,
    SCHEDULES,
    expected,
    measured_ceilings,
    needed_bytes,
    new_tokens,
    predicted_by_share,
    room,
    timed_rounds,
)
from benchmarks.shape_models import COMPILE_MODES, SHAPES, CompiledStep, free_bytes, random_model
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.theory import Hardware

KIND, RATIOS, SCHEMA = "engine-shapes", "engine-shapes-ratios", 1
# In order of their worth: a run that is killed has the first ones. Fields of `EngineConfig`.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False},
    "planned": {"speculative": False, "cruise": False},
    "speculative": {"delayed_verification": False},
    "delayed": {"cruise": False},
    "cruise": {},
    "lockstep": {"phases": "lockstep", "delayed_verification": False},
}
VARIANTS = ("plain", "cruise", BASELINE, "delayed", "speculative", "lockstep", "planned")
COMPARED = (
    ("speculative", "plain"), ("speculative", BASELINE), ("plain", BASELINE),
    ("delayed", "speculative"), ("delayed", BASELINE), ("speculative", "lockstep"),
    ("cruise", "plain"), ("cruise", BASELINE), ("cruise", "delayed"), ("plain", "planned"),
)  # fmt: skip
# Of a record's fields, those that its line has.
SHOWN = (
    "step_ms", "tokens_per_second", "mean_accepted", "busy_share", "floor_share", "predicted",
    "ratios", "predicted_by_share", "graphs_off", "fused_off", "seconds", "skipped", "error",
)  # fmt: skip

Record = dict[str, Any]


def main() -> None:
    given = parsed()
    device = torch.device(given.device)
    model = random_model(given.shape, device)
    ceilings = measured_ceilings(device)
    states = [
        cell(given, model, ceilings, batch, length)
        for batch in given.batch
        for length in given.length
    ]
    if not all(states):
        raise SystemExit("some variants failed; their records say why")


def cell(
    given: argparse.Namespace, model: Any, ceilings: Hardware, batch: int, length: int
) -> bool:
    """Write the records of a cell; return whether no variant has failed."""
    done, is_right = measure_variants(
        given.variants,
        header=lambda name: header(given, model, ceilings, batch, length, name),
        measure=lambda name: variant(given, model, ceilings, batch, length, name),
        write=lambda record: written(given, record),
    )
    ratios = {
        f"{a} / {b}": speed(done[a]) / speed(done[b])
        for a, b in COMPARED
        if a in done and b in done
    }
    if ratios:
        found = {"kind": RATIOS, "ratios": ratios, **predicted_by_share(given, done)}
        written(given, {**header(given, model, ceilings, batch, length, "ratios"), **found})
    return is_right


def parsed() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--batch", type=integers, default=[32], help="requests; with commas")
    parser.add_argument("--length", type=integers, default=[16384], help="tokens; with commas")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, and in what order")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--rate", type=float, default=0.77, help="accepted / drafted, replayed")
    parser.add_argument("--min-budget", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10, help="of k + 1 timed steps, at least")
    parser.add_argument("--profiled", type=int, default=2, help="rounds whose kernels are seen")
    parser.add_argument("--compile", choices=COMPILE_MODES, default=COMPILE_MODES[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    split_variants(parser, given, VARIANTS)
    return given


def variant(
    given: argparse.Namespace, model: Any, ceilings: Hardware, batch: int, length: int, name: str
) -> Record:
    """Return what one variant measures in one cell.

    Raises:
        MemoryError: it does not fit; says by how much.
    """
    steps, profiled = (
        rounds * (given.k + 1) for rounds in (timed_rounds(given, batch), given.profiled)
    )
    needed, free = needed_bytes(given, model, batch, length, name), free_bytes(model.device)
    if needed > free:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB beside the model, {free / 1e9:.1f} free")
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    # Given up again before memory is collected.
    engine: Any
    steady: Any
    plain: Any
    try:
        if name == BASELINE:
            plain = CompiledStep(model, batch=batch, length=length, mode=given.compile)
            try:
                found = plain.run(steps, profiled)
            finally:
                plain.free()
            middle = length
        else:
            pillarattn.patch(model, join_weights=model.device.type == "cuda")
            engine = pillarattn.Engine(model, config_of(given, batch, length, name))
            if model.device.type == "cpu":
                # As on a GPU: requests share one call a layer, over buffers.
                engine.runner.uses_buffers = True
            rate = given.rate if name in SCHEDULES else None
            steady = SteadyEngine(engine, rate=rate, batch=batch, length=length,
                                  new_tokens=new_tokens(given, batch))  # fmt: skip
            found = steady.run(steps, profiled)
            middle = found["mean_length"]
        if model.device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(model.device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error).split(". ")[0]) from error
    finally:
        engine = steady = plain = None
        pillarattn.unpatch(model)
        gc.collect()
    return {**found, **expected(given, model, ceilings, batch, middle, name, found["step_ms"])}


def config_of(
    given: argparse.Namespace, batch: int, length: int, name: str
) -> pillarattn.EngineConfig:
    """Return an engine that reads all prompts in one step and has room for all requests."""
    pillar = pillarattn.PillarConfig(
        k=given.k, s=given.s, min_budget=given.min_budget,
        kernels="reference" if given.device == "cpu" else "auto",
    )  # fmt: skip
    return pillarattn.EngineConfig(
        kv_tokens=batch * room(given, batch, length), max_batch=batch, prefill_chunk=batch * length,
        pillar=pillar, prefix_cache=False, seed=1, **ENGINES[name],
    )  # fmt: skip


def speed(record: Record) -> float:
    return float(record["tokens_per_second"])


def header(
    given: argparse.Namespace, model: Any, ceilings: Hardware, batch: int, length: int, name: str
) -> Record:
    """Return what a record says before anything is measured."""
    is_replayed = name in SCHEDULES or name == "ratios"
    return {
        "kind": KIND, "schema": SCHEMA, "shape": given.shape, "variant": name, "batch": batch,
        "length": length, "weights": "random", "prompts": "random keys and values",
        "acceptance": f"replayed {given.rate:g}" if is_replayed else None,
        "settings": {**vars(given), "out": None},
        "ceilings": {"bytes_per_second": ceilings.bandwidth, "flops": ceilings.flops},
        "environment": environment(model.device), "commit": source_commit(),
    }  # fmt: skip


def written(given: argparse.Namespace, record: Record) -> None:
    """Append a record to the file, and say in a line what it found."""
    write_record(record, out=given.out, shown=SHOWN)


if __name__ == "__main__":
    main()
