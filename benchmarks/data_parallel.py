"""A sweep of 24 cells in one process and under `accelerate launch`: wall time, and equal results.

    python -m benchmarks.data_parallel --out benchmarks/results/data_parallel_h200x2.jsonl

A random model that reads bytes is saved once; each launch is a process tree of its own, start-up
included. `--tiny` runs it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pillarattn.evaluation.environment import environment, machine, source_commit
from pillarattn.evaluation.notebook_model import notebook_model
from pillarattn.evaluation.results import read_records

GRID = {
    "strategy": ["pillar", "streaming", "vegas", "uniform"],
    "k": [2, 4],
    "s": [0.05, 0.1, 0.2],
}
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "initializer_range": 0.12}  # fmt: skip
SWEEP = ("-m", "pillarattn.cli.main", "sweep")
# What may differ between two runs of one cell: clocks and places.
CLOCKS = ("seconds", "per_second", "speedup", "reused", "predicted", "memory")


def save_model(folder: Path, *, tiny: bool) -> None:
    """Save a random model and its tokenizer."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = notebook_model(tiny=True)
    if not tiny:
        for name, value in WIDE.items():
            setattr(model.config, name, value)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def launch(sweep: Path, out: Path, processes: int) -> float:
    """Run a sweep in so many processes; return the seconds from start to end."""
    command = [sys.executable]
    if processes > 1:
        # `--multi_gpu` starts several processes without GPUs too; without it a CPU gets one.
        command += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes",
                    str(processes), "--num_machines", "1", "--mixed_precision", "no",
                    "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
    command += [*SWEEP, str(sweep), "--out", str(out), "--keep-texts"]
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=sys.stderr)
    return time.perf_counter() - begun


def outcome(record: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same wherever a cell was run."""
    metrics = {
        name: value
        for name, value in record["metrics"].items()
        if not any(word in name for word in CLOCKS)
    }
    examples = [
        {name: value for name, value in line.items() if not any(w in name for w in CLOCKS)}
        for line in record["examples"]
    ]
    return {"metrics": metrics, "examples": examples, "lossless": record["lossless"]}


def main() -> int:
    """Run both and compare; the exit code is 1 if results differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_model(folder / "model", tiny=options.tiny)
        base = {"model": str(folder / "model"), "n": 4, "batch_size": 4, "recall_tokens": 0,
                "max_new_tokens": 8 if options.tiny else options.new_tokens, "ignore_eos": True,
                "options": {"min_budget": 16}}  # fmt: skip
        sweep = folder / "grid.json"
        sweep.write_text(json.dumps({"base": base, "grid": GRID}))
        seconds = {n: launch(sweep, folder / f"out-{n}", n) for n in (1, options.processes)}
        found = {n: {r["hash"]: r for r in read_records(folder / f"out-{n}")} for n in seconds}
    alone, shared = found[1], found[options.processes]
    differing = [
        key for key in alone if key not in shared or outcome(alone[key]) != outcome(shared[key])
    ]
    failed = [r["error"] for r in alone.values() if r["status"] != "ok"]
    cell_seconds = sum(r["seconds"] for r in alone.values())
    record = {
        "kind": "data_parallel",
        "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        "machine": machine(),
        "commit": source_commit(),
        "cells": len(alone),
        "failed": failed,
        "processes": options.processes,
        "seconds": {str(n): round(taken, 2) for n, taken in seconds.items()},
        "cell_seconds_of_one_process": round(cell_seconds, 2),
        "speedup": round(seconds[1] / seconds[options.processes], 3),
        "results_identical": not differing and len(alone) == len(shared),
        "differing_cells": len(differing),
        "lossless_cells": sum(bool(r["lossless"]["lossless"]) for r in shared.values()),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as out:
        out.write(json.dumps(record) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k not in ("environment", "machine")}))
    return 1 if differing or failed else 0


if __name__ == "__main__":
    sys.exit(main())
