"""`pillarattn bench engine`: the engine, plain and speculative, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pillarattn.cli.console import check_json_target, human_console, readable_errors, write_json
from pillarattn.cli.option_types import (
    Device,
    Dtype,
    JsonTarget,
    MinBudget,
    ModelName,
    SamplingTemperature,
    StrategyName,
)
from pillarattn.cli.option_values import parse_numbers


def engine(
    model: ModelName = "smollm2",
    batch: Annotated[
        str, typer.Option("--batch", help="Requests that run together; with commas.")
    ] = "8",
    length: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 1024,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens to generate, whatever the model says.")
    ] = 128,
    queued: Annotated[
        int, typer.Option(help="Requests that wait behind a batch, and come in as others end.")
    ] = 0,
    k: Annotated[
        str, typer.Option("--k", help="Tokens drafted per round; with commas: an engine each.")
    ] = "8",
    s: Annotated[float, typer.Option(help="Share of the context that a draft may read.")] = 0.05,
    strategy: StrategyName = "pillar",
    min_budget: MinBudget = 128,
    temperature: SamplingTemperature = 0.6,
    synchronous: Annotated[
        bool, typer.Option(help="Time passes that are looked at before the next one begins.")
    ] = True,
    auto: Annotated[
        bool, typer.Option(help="Also time an engine that measures both ways and chooses.")
    ] = True,
    lockstep: Annotated[
        bool, typer.Option(help="Also time rounds in which all requests verify together.")
    ] = True,
    delayed: Annotated[
        bool, typer.Option(help="Also time passes that begin before the last is looked at.")
    ] = True,
    cruise: Annotated[
        bool, typer.Option(help="Also time rounds that follow each other without plans.")
    ] = True,
    acceptance: Annotated[
        str,
        typer.Option(help="How sampled drafts are judged: gumbel, rejection, block; with commas."),
    ] = "gumbel",
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant.")] = 3,
    warm_ups: Annotated[int, typer.Option(help="Short runs of each variant before those.")] = 1,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: Annotated[
        Path | None,
        typer.Option(help="JSON Lines to append to: a record of each run, and one a batch size."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Figure to draw: .png, .pdf or .svg.")] = None,
    json_to: JsonTarget = None,
) -> None:
    """Time the engine on one batch of requests: plain, speculative, in lockstep, delayed, cruising.

    Tokens a second count from the moment when all prompts of the batch are read; those "while all
    run" end when fewer requests are left than a batch has. Greedy tokens, and sampled ones by
    gumbel, are compared with plain ones; in float32 the exit code is 1 where they differ.
    """
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        from pillarattn.evaluation.engine_bench import EngineBench, run_engine_bench

        bench = EngineBench(
            model=model, batches=parse_numbers(batch, "--batch"), length=length,
            new_tokens=new_tokens, queued=queued, ks=parse_numbers(k, "--k"), s=s,
            strategy=strategy, min_budget=min_budget, temperature=temperature,
            acceptances=tuple(acceptance.split(",")), synchronous=synchronous, auto=auto,
            lockstep=lockstep, delayed=delayed, cruise=cruise, repeats=repeats, warm_ups=warm_ups,
            device=device, dtype=dtype,
        )  # fmt: skip
        with console.status("loading") as status:
            records = run_engine_bench(
                bench, on_run=lambda batch, name: status.update(f"B={batch}: {name}"),
                on_done=lambda run: _keep(console, out, run),
            )  # fmt: skip
        _write(console, records, out=out, plot=plot)
        write_json({"command": "bench engine", "cells": records}, json_to)
        console.print(_table(records))
        _check(console, records)


def _keep(console: Console, out: Path | None, run: dict[str, Any]) -> None:
    """Print what a run took, and append it to `out`: what is interrupted later keeps it."""
    from pillarattn.evaluation.results import append_record

    speed = run["run"]["tokens"] / run["run"]["seconds"]
    console.print(f"B={run['batch']} {run['variant']}: {speed:,.1f} tokens/s", markup=False)
    if out is not None:
        append_record(out, run)


def _write(
    console: Console, records: list[dict[str, Any]], *, out: Path | None, plot: Path | None
) -> None:
    """Write what was asked for: records, and their figure."""
    from pillarattn.evaluation.results import append_record

    if out is not None:
        for record in records:
            append_record(out, record)
    if plot is not None:
        from pillarattn.evaluation.plots import plot_engine_bench, save

        save(plot_engine_bench(records), plot)
        console.print(f"Plot: {plot}", markup=False)


def _table(records: list[dict[str, Any]]) -> Table:
    about = records[0]["environment"]
    table = Table(title=f"Decode tokens a second, all requests ({about['device_name']})")
    for heading in (
        "B", "variant", "tokens/s", "spread", "speed-up", "while all run", "accepted a round",
        "tokens",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("variant", "tokens") else "right")
    for record in records:
        for name, found in record["variants"].items():
            low, high = found["spread"]
            run = found["runs"][-1]
            table.add_row(
                str(record["batch"]),
                name,
                f"{found['tokens_per_second']:.1f}",
                f"{low:.1f}..{high:.1f}",
                f"{found['speedup']:.2f}x",
                f"{found['all_tokens_per_second']:.1f}",
                f"{run['mean_accepted']:.2f}",
                _agreement(found, record["batch"] + record["settings"].get("queued", 0)),
            )
        table.add_section()
    return table


def _agreement(found: dict[str, Any], requests: int) -> str:
    """Say whether tokens are plain decoding's, or of how many requests they are not."""
    if found["same_tokens"] is None:
        return ""
    # Records of earlier versions do not say of how many.
    count = found.get("different_requests")
    differ = "differ" if count is None else f"differ in {count} of {requests}"
    return "as plain" if found["same_tokens"] else differ


def _check(console: Console, records: list[dict[str, Any]]) -> None:
    """Leave with 1 where tokens that must be equal are not."""
    for record in records:
        wrong = [n for n, found in record["variants"].items() if found["same_tokens"] is False]
        if wrong and record["settings"]["dtype"] == "float32":
            console.print(f"B={record['batch']}: {', '.join(wrong)} differs from plain decoding")
            raise typer.Exit(1)
