"""`pillarattn report`: tables and figures of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pillarattn.cli.console import (
    check_json_target,
    human_console,
    readable_errors,
    write_json,
)
from pillarattn.cli.option_types import JsonTarget
from pillarattn.evaluation.report import FORMATS, Report
from pillarattn.evaluation.report import report as make_report

SCHEMA = 1


def report(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Files of `evaluate --out`, folders of `sweep`, files of saved probes."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write into; left out: the tables are printed as Markdown."),
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help=f"What to write, with commas: {', '.join(FORMATS)}.")
    ] = ",".join(FORMATS),
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw figures too, with matplotlib.")
    ] = True,
    json_to: JsonTarget = None,
) -> None:
    """Turn results into Markdown, CSV and HTML tables, and figures."""
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        wanted = [name.strip() for name in formats.split(",") if name.strip()]
        unknown = sorted(set(wanted) - set(FORMATS))
        if unknown or not wanted:
            raise ValueError(f"--format takes {', '.join(FORMATS)}, got {formats!r}")
        found = make_report(paths, plots=plots and out is not None)
        written = found.write(out, wanted) if out is not None else []
    if out is None:
        console.print(found.to_markdown(), markup=False, soft_wrap=True)
    for path in written:
        console.print(str(path), markup=False, soft_wrap=True)
    write_json(_as_json(found, written), json_to)


def _as_json(found: Report, written: list[Path]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": "report",
        "measurements": len(found.measurements.rows),
        "failed": len(found.measurements.failed),
        "environments": found.measurements.environments,
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "rows": [dict(zip(table.headings, row, strict=True)) for row in table.rows],
            }
            for table in found.tables
        ],
        "written": [str(path) for path in written],
    }
