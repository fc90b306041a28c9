"""`pillarattn sweep`: many settings, resumed where it stopped, over one or many processes."""

from __future__ import annotations

from collections.abc import Mapping
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
from pillarattn.cli.evaluation_tables import show_cells
from pillarattn.cli.option_types import AllowCode, Imports, JsonTarget, KeepTexts
from pillarattn.cli.option_values import check_names, import_modules, parse_axes, parse_pairs
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.results import MERGED, read_records, result_files
from pillarattn.evaluation.runner import Runner
from pillarattn.evaluation.sweep import Worker, run_sweep
from pillarattn.evaluation.sweep_grid import expand, read_sweep

SCHEMA = 1


SweepFile = Annotated[
    Path | None,
    typer.Argument(
        help="A YAML, JSON or TOML file with `base` (what all cells share), `grid` (lists of "
        "what varies) and `cells` (single ones). Left out: --set and --grid say it all."
    ),
]
Folder = Annotated[Path, typer.Option(help="Folder of the results; an existing one is resumed.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE for every cell, over the file; repeatable."),
]
Axes = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE,VALUE,...: an axis, over the file's; repeatable."),
]
RetryFailed = Annotated[
    bool,
    typer.Option("--retry-failed/--keep-failed", help="Run cells again that have failed."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="List the cells and their hashes; run nothing.")
]


def sweep(
    file: SweepFile = None,
    out: Folder = Path("sweep"),
    set_: Settings = None,
    grid: Axes = None,
    retry_failed: RetryFailed = True,
    dry_run: DryRun = False,
    allow_code_execution: AllowCode = False,
    import_: Imports = None,
    keep_texts: KeepTexts = False,
    json_to: JsonTarget = None,
) -> None:
    """Run every cell of a grid that has no result yet; `accelerate launch` spreads them.

    One process: pillarattn sweep grid.yaml --out runs/first

    Four GPUs: accelerate launch --multi_gpu --num_processes 4 -m pillarattn.cli.main sweep
    grid.yaml --out runs/first

    --multi_gpu starts several processes on a CPU too; without it, a machine with fewer than two
    GPUs gets one process.

    The exit code is 1 if a cell failed (0 under a launcher, which would end its other processes).
    """
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        import_modules(import_ or [])
        configs = _configs(file, set_ or [], grid or [], allow_code_execution)
        worker = Worker.from_environment()
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out: {str(out)!r} is a file; give a folder")
        if result_files(out):
            # Better to hear of a damaged file now than after the first cell.
            read_records(out)
    if dry_run:
        for config in configs:
            console.print(f"{config.hash}  {config.label}", markup=False)
        write_json({"schema": SCHEMA, "command": "sweep", "cells": _plans(configs)}, json_to)
        return
    with readable_errors():
        out.mkdir(parents=True, exist_ok=True)
    with SweepProgress(console, worker) as progress:
        records = run_sweep(
            configs,
            out,
            worker=worker,
            runner=Runner(device=worker.device, keep_texts=keep_texts),
            listener=progress,
            retry_failed=retry_failed,
        )
    failed = [record for record in records if record["status"] != "ok"]
    # Of several processes, the one that ends last shows the whole.
    if worker.world == 1 or len(records) == len(configs):
        show_cells(console, records)
        console.print(f"results: {out / MERGED}", markup=False, soft_wrap=True)
        write_json(
            {
                "schema": SCHEMA,
                "command": "sweep",
                "folder": str(out),
                "cells": len(configs),
                "failed": len(failed),
                "records": records,
            },
            json_to,
        )
    # A launcher would end the other processes for it; the records say what failed.
    if failed and worker.world == 1:
        raise typer.Exit(1)


class SweepProgress:
    """A bar for people at a terminal, one line a cell for everybody else."""

    def __init__(self, console: Console, worker: Worker) -> None:
        self.console = console
        self.name = "" if worker.world == 1 else f"[{worker.rank + 1}/{worker.world}] "
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._cells = self._progress.add_task(f"{self.name}cells", total=None)
        self._batches = self._progress.add_task("", total=None)

    def __enter__(self) -> SweepProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def plan(self, todo: int, done: int) -> None:
        """Show how much there is to do."""
        self._progress.update(self._cells, total=todo)
        resumed = f", {done} done before" if done else ""
        self.console.print(
            f"{self.name}{todo} cell{'' if todo == 1 else 's'} to run{resumed}", markup=False
        )

    def begin(self, config: EvalConfig) -> None:
        """Show the cell that starts."""
        self._progress.reset(self._batches, description=config.label, total=None)

    def batch(self, done: int, total: int) -> None:
        """Show the batches that are done."""
        self._progress.update(self._batches, completed=done, total=total)

    def end(self, record: Mapping[str, Any]) -> None:
        """Show what came of a cell."""
        self._progress.advance(self._cells)
        if record["status"] == "ok":
            found = f"{record['metrics']['mean_accepted']:.2f} accepted"
            checked = record["lossless"]
            found += "" if checked is None or checked["lossless"] else ", NOT LOSSLESS"
        else:
            found = "failed: " + " ".join(record["error"].split())
        line = f"{self.name}{record['label']}: {found} ({record['seconds']:.1f} s)"
        self.console.print(line, markup=False, soft_wrap=True)


def _configs(
    file: Path | None, settings: list[str], axes: list[str], run_code: bool
) -> list[EvalConfig]:
    overrides = parse_pairs(settings, "--set")
    if run_code:
        overrides["run_code"] = True
    values = {} if file is None else read_sweep(file)
    extra = parse_axes(axes, "--grid")
    if file is None and not extra:
        raise ValueError("give a sweep FILE, or at least one --grid NAME=VALUE,VALUE,...")
    if extra:
        values = {**values, "grid": {**(values.get("grid") or {}), **extra}}
    configs = expand(values, overrides=overrides)
    if any(config.run_code for config in configs) and not run_code:
        raise ValueError("the sweep asks for run_code; confirm it with --allow-code-execution")
    for config in configs:
        check_names(config)
    return configs


def _plans(configs: list[EvalConfig]) -> list[dict[str, Any]]:
    return [{"hash": c.hash, "label": c.label, "config": c.to_dict()} for c in configs]
