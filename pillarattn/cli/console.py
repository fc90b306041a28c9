"""Where a command writes: text for people, JSON for machines, one line for a user's mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

BAD_INPUT = 2


def human_console(json_to: str | None) -> Console:
    """Return the console for people: stdout, or stderr where stdout is kept for JSON.

    Without a terminal it writes plain lines, with no control characters.
    """
    stream = sys.stderr if json_to == "-" else sys.stdout
    terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        force_terminal=terminal,
        no_color=None if terminal else True,
        width=None if terminal else 100,
    )


def write_json(record: dict[str, Any], json_to: str | None) -> None:
    """Write a record to stdout ("-"), to a file, or nowhere (None)."""
    if json_to is None:
        return
    text = json.dumps(record, indent=2)
    if json_to == "-":
        typer.echo(text)
    else:
        Path(json_to).write_text(text + "\n")


def check_json_target(json_to: str | None) -> None:
    """Raise `ValueError` early if the file cannot be written after all the work."""
    if json_to not in (None, "-") and not Path(str(json_to)).absolute().parent.is_dir():
        raise ValueError(f"--json: the folder of {json_to!r} does not exist; make it first")


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn a user's mistake inside the block into one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        line = " ".join(str(error).split())
        typer.echo(f"Error: {line}", err=True)
        raise typer.Exit(BAD_INPUT) from None
