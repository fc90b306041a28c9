"""The `pillarattn` command: parses, and hands over to one file a command."""

from __future__ import annotations

from typing import Annotated

import typer

from pillarattn import __version__
from pillarattn.cli.bench import bench
from pillarattn.cli.calibrate import calibrate
from pillarattn.cli.evaluate import evaluate
from pillarattn.cli.generate import generate
from pillarattn.cli.info import info
from pillarattn.cli.probe import probe
from pillarattn.cli.report import report
from pillarattn.cli.serve import serve
from pillarattn.cli.sweep import sweep

app = typer.Typer(
    name="pillarattn",
    help="Lossless sparse self-speculative decoding for Hugging Face causal language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate)
app.command("info")(info)
app.command("probe")(probe)
app.command("calibrate")(calibrate)
app.command("evaluate")(evaluate)
app.command("sweep")(sweep)
app.command("report")(report)
app.command("serve")(serve)
app.add_typer(bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pillarattn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Lossless sparse self-speculative decoding for Hugging Face causal language models."""


if __name__ == "__main__":
    app()
