"""`pillarattn bench generate`: plain, fixed and gated `generate` in turns, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pillarattn.cli.console import (
    check_json_target,
    human_console,
    readable_errors,
    write_json,
)
from pillarattn.cli.generate_bench_tables import show_bench
from pillarattn.cli.option_types import (
    Device,
    Dtype,
    JsonTarget,
    MinBudget,
    ModelName,
    SamplingTemperature,
    StrategyName,
)
from pillarattn.cli.option_values import parse_numbers, parse_value
from pillarattn.config import AUTO
from pillarattn.evaluation.generate_bench_settings import GenerateBench

SCHEMA = 1

Batches = Annotated[str, typer.Option("--batch", help="Rows that decode together; with commas.")]
Lengths = Annotated[str, typer.Option("--length", help="Prompt tokens of a row; with commas.")]
Fixed = Annotated[
    str, typer.Option(help="Settings K:S to run beside the gate, with commas; '' for none.")
]
Auto = Annotated[bool, typer.Option("--auto/--no-auto", help="Run the cost gate, k='auto'.")]
AutoShare = Annotated[str, typer.Option(help="The gate's s: a number, or auto.")]
Static = Annotated[
    bool | None,
    typer.Option(
        "--static/--no-static",
        help="Run plain decoding with a static cache too, which transformers compiles on a GPU "
        "(default: on a GPU).",
    ),
]
NewTokens = Annotated[int, typer.Option(help="Tokens to generate, whatever the model says.")]
Repeats = Annotated[int, typer.Option(help="Timed runs of each variant, after one to warm up.")]
CheckTokens = Annotated[
    int, typer.Option(help="Tokens compared with plain decoding before timing; 0 skips it.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling, the same noise in every run.")]
SharedPrompt = Annotated[
    bool, typer.Option("--shared-prompt", help="All rows of a batch continue one text.")
]
ReusePrompt = Annotated[
    bool,
    typer.Option(
        "--reuse-prompt",
        help="Compute the prompt once a cell and copy its cache: runs cost their decode alone.",
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads (default: torch's choice).")]
Out = Annotated[
    Path | None, typer.Option(help="JSON Lines to append to; cells that it holds are not run.")
]
Plot = Annotated[Path | None, typer.Option(help="Figure to draw: .png, .pdf or .svg.")]


def generate(
    model: ModelName = "smollm2",
    batch: Batches = "1,8",
    length: Lengths = "1024,4096",
    fixed: Fixed = "4:0.05,8:0.05",
    auto: Auto = True,
    auto_s: AutoShare = AUTO,
    static: Static = None,
    new_tokens: NewTokens = 128,
    repeats: Repeats = 3,
    strategy: StrategyName = "pillar",
    min_budget: MinBudget = 128,
    temperature: SamplingTemperature = 0.0,
    seed: Seed = None,
    shared_prompt: SharedPrompt = False,
    reuse_prompt: ReusePrompt = False,
    check_tokens: CheckTokens = 32,
    threads: Threads = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: Out = None,
    plot: Plot = None,
    json_to: JsonTarget = None,
) -> None:
    """Time `generate`: plain, with drafts at fixed settings, and with the cost gate.

    Variants take turns within one process, so that a slow minute hits them all. Tokens are compared
    with plain decoding first; the exit code is 1 if float32 tokens differ.
    """
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        from pillarattn.evaluation.demo_model import resolve_device, resolve_dtype
        from pillarattn.evaluation.generate_bench import failures, read_bench, run_generate_bench

        where, _ = resolve_device(device), resolve_dtype(dtype)
        on_gpu = where.type == "cuda" and not reuse_prompt
        bench = GenerateBench(
            model=model,
            batches=parse_numbers(batch, "--batch"),
            lengths=parse_numbers(length, "--length"),
            new_tokens=new_tokens,
            fixed=_settings(fixed),
            auto=auto,
            auto_s=_share(auto_s),
            static=on_gpu if static is None else static,
            strategy=strategy,
            min_budget=min_budget,
            temperature=temperature,
            seed=seed,
            shared_prompt=shared_prompt,
            reuse_prompt=reuse_prompt,
            repeats=repeats,
            check_tokens=check_tokens,
            device=str(where),
            dtype=dtype,
            threads=threads,
        )
        for option, path in (("--out", out), ("--plot", plot)):
            if path is not None and path.is_dir():
                raise ValueError(f"{option}: {str(path)!r} is a folder; give a file")
        if plot is not None and not auto:
            raise ValueError("--plot draws what the gate reached; leave --no-auto out")
        if out is not None:
            read_bench(out)
        progress, heard = _progress(console, bench)
        with progress:
            records = run_generate_bench(bench, out=out, **heard)
        show_bench(console, records)
        if plot is not None:
            from pillarattn.evaluation.plots import plot_generate_bench, save

            console.print(f"Plot: {save(plot_generate_bench(records), plot)}")
    write_json({"schema": SCHEMA, "command": "bench generate", "cells": records}, json_to)
    wrong = failures(records)
    for line in wrong:
        console.print(line, style="bold red", markup=False)
    if wrong and dtype == "float32":
        raise typer.Exit(1)


def _settings(text: str) -> tuple[tuple[int, float], ...]:
    """Return settings written as K:S with commas."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        k, mark, s = part.partition(":")
        try:
            found.append((int(k), float(s)))
        except ValueError:
            mark = ""
        if not mark:
            raise ValueError(f"--fixed takes K:S with commas, such as 8:0.05, got {part!r}")
    return tuple(dict.fromkeys(found))


def _share(text: str) -> float | str:
    value = parse_value(text)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _progress(
    console: Console, bench: GenerateBench
) -> tuple[AbstractContextManager[Any], dict[str, Callable[..., None]]]:
    """Return a progress bar, and what tells it; plain lines where there is no terminal."""
    if not console.is_terminal:

        def cell_line(batch: int, length: int, is_done: bool) -> None:
            what = "measured before" if is_done else "measuring"
            console.print(f"B={batch}, L={length}: {what}", markup=False)

        return nullcontext(), {"on_cell": cell_line}
    assistants = sum(variant.k is not None for variant in bench.variants)
    checks = assistants if bench.check_tokens else 0
    each = len(bench.variants) * (bench.repeats + 1) + checks + bench.reuse_prompt
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
    task = progress.add_task("loading", total=each * len(bench.cells))
    cells: list[str] = []

    def on_cell(batch: int, length: int, is_done: bool) -> None:
        cells.append(f"B={batch}, L={length}")
        done = len(cells) - (0 if is_done else 1)
        progress.update(task, description=cells[-1], completed=each * done)

    def on_run(name: str) -> None:
        progress.update(task, description=f"{cells[-1]}: {name}", advance=1)

    return progress, {"on_cell": on_cell, "on_run": on_run}
