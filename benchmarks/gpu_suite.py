"""Most figures of the pages that one GPU has: correctness first, then one part after the other.

    python -m benchmarks.gpu_suite --out results --dataset olympiadbench.jsonl --seconds 1500

A part that fails is named and the next one begins, unless the device is lost with it: then a call
with `--only` runs the others. No part begins that would end past `--seconds`
by its usual time; parts that `suite.jsonl` in `--out` says are done are passed over, so that a
second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pillarattn.cli.main import app
from pillarattn.evaluation.environment import environment, source_commit

# How a part ends after which the device answers this process no more.
LOST = "the device is lost"
TESTS = (
    "tests/kernels", "tests/patch/test_cuda_graphs.py", "tests/patch/test_strict.py",
    "tests/engine",
)  # fmt: skip
ENGINE = (
    "bench engine --device cuda --dtype bfloat16 --length 4096 --temperature 0.6 --k 4 "
    "--no-lockstep --no-synchronous --no-delayed --warm-ups 1 --repeats 1"
)
STEPS = "engine_shapes --shape 8b"
PEERS = "engine_peers --device cuda --dtype bfloat16 --length 4096 --new-tokens 256"
KERNELS = "bench kernels --op gumbel_argmax"
GENERATE = "bench generate --device cuda --dtype bfloat16 --new-tokens 256 --length 7680"
SHAPES = "generate_shapes --shape"


@dataclass(frozen=True)
class Part:
    """One thing to run.

    Attributes:
        name: of its record.
        command: of the command line, or of a module of `benchmarks` if `is_module`.
        seconds: what it usually takes, loading and compiling included.
        out: the option that names its record.
        is_module: see `command`.
        is_strict: whether it runs in a process of its own, whose products have no workspace.
    """

    name: str
    command: str
    seconds: float
    out: str = "--out"
    is_module: bool = False
    is_strict: bool = False


PARTS = (
    Part("kernels", f"{KERNELS} --op rejection_sample --op keyed_rejection", 110, "--json"),
    Part("engine_64", f"{ENGINE} --batch 64 --new-tokens 4096", 130),
    Part("engine_256", f"{ENGINE} --batch 256 --new-tokens 4096 --no-auto", 150),
    Part("engine_queued", f"{ENGINE} --batch 64 --queued 192 --new-tokens 1024 --no-auto", 120),
    Part("engine_8b", f"{STEPS} --batch 32 --length 16384 --k 7 --variants plain,cruise,baseline",
         110, is_module=True),
    Part("engine_8b_ways", f"{STEPS} --batch 32 --length 16384 --variants "
         "plain,cruise,delayed,speculative,lockstep,planned", 200, is_module=True),
    Part("engine_8b_1", f"{STEPS} --batch 1 --length 16384 --k 7 --variants plain,cruise,baseline",
         100, is_module=True),
    Part("engine_offload", "engine_offload --device cuda --dtype bfloat16 --requests 96 "
         "--mean-new 600 --longest 1638", 340, is_module=True),
    Part("engine_map", f"{STEPS} --batch 1,8,32,64,128,256 --length 2048,4096,8192,16384,32768 "
         "--k 7 --rounds 5 --profiled 0 --variants plain,cruise", 600, is_module=True),
    Part("peers_16", f"{PEERS} --batch 16", 300, is_module=True),
    Part("peers_64", f"{PEERS} --batch 64", 340, is_module=True),
    Part("generate_16", f"{GENERATE} --batch 16 --fixed 0:0.05,8:0.05", 150),
    Part("generate_1", f"{GENERATE} --batch 1 --fixed 0:0.05,8:0.05", 120),
    Part("generate_64", f"{GENERATE} --batch 64 --fixed 0:0.05,8:0.05", 200),
    Part("generate_8b_1", f"{SHAPES} 8b --batch 1 --length 16384 --new-tokens 512", 260,
         is_module=True),
    Part("generate_8b_16", f"{SHAPES} 8b --batch 16 --length 8192", 300, is_module=True),
    Part("generate_1.7b_1", f"{SHAPES} 1.7b --batch 1 --length 8192 --new-tokens 512", 200,
         is_module=True),
    Part("generate_1.7b_16", f"{SHAPES} 1.7b --batch 16 --length 8192", 200, is_module=True),
    Part("generate_smollm2", f"{SHAPES} smollm2 --batch 1,16,64 --length 8192", 420,
         is_module=True),
    Part("prompt_8b", f"{SHAPES} 8b --length 32768 --new-tokens 32 "
         "--variants dynamic,plain,speculative", 80, is_module=True),
    Part("probe", "probe_smollm2 --device cuda --dataset {dataset}", 90, is_module=True),
    Part("round_forecast", "round_profile --no-eager --strategy forecast", 60, is_module=True),
    Part("round_8b", "round_profile --no-eager --shape 8b --batch 32 --length 16384", 150,
         is_module=True),
    Part("strict", "strict_equality --k 4", 180, is_module=True, is_strict=True),
    Part("strict_8b", "strict_equality --shape 8b --k 4", 120, is_module=True, is_strict=True),
    Part("strict_engine", "strict_engine", 90, is_module=True, is_strict=True),
    Part("strict_engine_sampled", "strict_engine --temperature 0.6", 80, is_module=True,
         is_strict=True),
    Part("strict_engine_8b", "strict_engine --shape 8b", 110, is_module=True, is_strict=True),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--dataset", type=Path, help="problems with solutions, for the probe")
    parser.add_argument("--only", default="", help="parts, with commas; left out: all of them")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--tests", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    unknown = sorted(set(names) - {part.name for part in PARTS})
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        raise SystemExit(f"no part {', '.join(unknown)}; there are {known}")
    given.out.mkdir(parents=True, exist_ok=True)
    begin, done, before = time.monotonic(), [], _done_before(given.out)
    if given.tests:
        done.append(_run("tests", _tests))
        if done[-1][1] != "done":
            _report(done, given.out)
            raise SystemExit("tests failed: nothing is timed that is not right")
    for part in PARTS:
        if (names and part.name not in names) or part.name in before:
            continue
        if time.monotonic() - begin + part.seconds > given.seconds:
            done.append((part.name, "no time left", 0.0))
        elif "{dataset}" in part.command and given.dataset is None:
            done.append((part.name, "needs --dataset", 0.0))
        else:
            words = part.command.format(dataset=given.dataset).split()
            words += [part.out, str(given.out / f"{part.name}.jsonl")]
            done.append(_run(part.name, partial(_command, part, words)))
            if done[-1][1].startswith(LOST):
                break
    _report(done, given.out)
    if any(state.startswith(("failed", LOST)) for _, state, _ in done):
        raise SystemExit(1)


def _done_before(out: Path) -> set[str]:
    """Return the names of the parts that earlier calls have done."""
    suite = out / "suite.jsonl"
    lines = suite.read_text().splitlines() if suite.exists() else []
    parts = [part for line in lines for part in json.loads(line)["parts"]]
    return {part["name"] for part in parts if part["state"] == "done"}


def _tests() -> None:
    _strictly(["-m", "pytest", "-q", "-x", *TESTS])


def _strictly(arguments: list[str]) -> None:
    """Run Python in a process of its own, whose products have no workspace: strict mode asks it."""
    environ = {**os.environ, "CUBLASLT_WORKSPACE_SIZE": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environ, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:3])} ended with {done.returncode}")


def _command(part: Part, words: list[str]) -> None:
    if part.is_strict:
        _strictly(["-m", f"benchmarks.{words[0]}", *words[1:]])
    elif not part.is_module:
        code = app(words, standalone_mode=False)
        if code:
            raise RuntimeError(f"pillarattn {' '.join(words[:2])} ended with {code}")
    else:
        sys.argv = words
        import_module(f"benchmarks.{words[0]}").main()


def _run(name: str, work: Callable[[], None]) -> tuple[str, str, float]:
    """Run one part and return its name, how it ended, and its seconds."""
    print(f"== {name}", flush=True)
    begin, state = time.monotonic(), "done"
    try:
        work()
    except (Exception, SystemExit) as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            traceback.print_exc()
            state = f"failed: {type(error).__name__}: {error}"
    gc.collect()
    try:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except RuntimeError as error:
        # No part of this process can run any more.
        state = f"{LOST}: {error}"
    return name, state, time.monotonic() - begin


def _report(done: list[tuple[str, str, float]], out: Path) -> None:
    table = Table("part", "state", "seconds")
    for name, state, seconds in done:
        table.add_row(name, state, f"{seconds:.0f}")
    Console().print(table)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = {
        "kind": "gpu-suite", "environment": environment(torch.device(device)),
        "commit": source_commit(),
        "parts": [{"name": n, "state": s, "seconds": t} for n, s, t in done],
    }  # fmt: skip
    with (out / "suite.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
