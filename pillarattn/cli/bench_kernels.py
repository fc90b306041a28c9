"""`pillarattn bench kernels`: the Triton kernels checked, then timed against the card's ceiling."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pillarattn.cli.console import check_json_target, human_console, readable_errors
from pillarattn.evaluation.kernel_bench import OPS, bench_kernels, best_records, check_ready
from pillarattn.evaluation.report_tables import ReportTable


def kernels(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(OPS[:-1])} or {OPS[-1]}; repeat it for more. Left out: all of them."
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Try every choice of tiles, not only the default one.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One shape an op.")] = False,
    seconds: Annotated[
        float, typer.Option(help="Begin no further shape after this many seconds.")
    ] = 480.0,
    workers: Annotated[
        int, typer.Option(help="Processes that compile ahead; 0 compiles as it goes.")
    ] = 8,
    json_to: Annotated[
        str | None,
        typer.Option("--json", help="Write every record as a line of JSON to a file, or to - ."),
    ] = None,
    taken: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="Measure nothing and show a file of --json; repeat it, older ones first."
        ),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="Write the tables as Markdown to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw each op's share of the ceiling into this file.")
    ] = None,
) -> None:
    """Check the Triton kernels against fp64, then time them beside what else is installed.

    Needs an NVIDIA GPU, unless it shows what was measured (--from). Times are medians of CUDA graph
    replays on inputs that rotate through memory; the ceiling is a read of as many bytes, measured
    in the same run.
    """
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        records: list[dict[str, Any]] = []
        if taken:
            for path in taken:
                records += _read(path)
            for found in _write(records, table, plot):
                console.print(found.to_markdown(), markup=False, soft_wrap=True)
            return
        ops = tuple(op or OPS)
        check_ready(ops)
        to_file = json_to not in (None, "-")
        with Path(str(json_to)).open("w") if to_file else nullcontext() as target:

            def emit(record: dict[str, Any]) -> None:
                records.append(record)
                line = json.dumps(record)
                if json_to == "-":
                    typer.echo(line)
                elif target is not None:
                    print(line, file=target, flush=True)

            bench_kernels(
                ops, sweep=sweep, quick=quick, seconds=seconds, workers=workers, emit=emit
            )
        _write(records, table, plot)
        _show(console, records, best_records(records))


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of `--json`."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a file of bench kernels --json: {error}") from error
    if not records or records[0].get("kind") != "machine":
        raise ValueError(f"{path} does not begin with a machine, as files of --json do")
    return records


def _write(
    records: list[dict[str, Any]], table: Path | None, plot: Path | None
) -> list[ReportTable]:
    """Write what was asked for and return the tables."""
    from pillarattn.evaluation.kernel_table import kernel_tables
    from pillarattn.evaluation.plots.canvas import save
    from pillarattn.evaluation.plots.kernels import plot_kernels

    tables = kernel_tables(records)
    if table is not None:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join(t.to_markdown() for t in tables))
    if plot is not None:
        save(plot_kernels(records), plot)
    return tables


def _show(console: Console, records: list[dict[str, Any]], best: list[dict[str, Any]]) -> None:
    machine = records[0]
    console.print(
        f"{machine['device_name']}: reads {machine['read_tbps']:.2f} TB/s, "
        f"multiplies {machine['matmul_tflops']:.0f} TFLOP/s (bf16)"
    )
    table = Table("op", "shape", "implementation", "us", "TB/s", "of its ceiling", "tiles")
    for record in best:
        shape = " ".join(f"{key}={value}" for key, value in record["shape"].items())
        tiles = record.get("tiles")
        table.add_row(
            record["op"],
            shape,
            record["implementation"],
            f"{record['median_us']:.1f}",
            f"{record['tbps']:.2f}",
            f"{record['share_of_matched']:.2f}",
            "default" if tiles is None else " ".join(f"{k}={v}" for k, v in tiles.items()),
        )
    console.print(table)
    failed = [r for r in records if "failed" in r and r["failed"] != "not installed"]
    for record in failed:
        console.print(
            f"failed: {record['op']} {record['shape']} {record.get('tiles')}: {record['failed']}",
            style="red",
        )
