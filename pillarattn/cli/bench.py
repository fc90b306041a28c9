"""`pillarattn bench`: what speed to expect, and what speed is reached."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pillarattn.cli.bench_engine import engine
from pillarattn.cli.bench_generate import generate
from pillarattn.cli.bench_kernels import kernels
from pillarattn.cli.bench_plan import plan


class _PlanFlag(TyperGroup):
    """A group that takes `bench --plan ...` as `bench plan ...`, with all of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the command for the flag, unless a command is named already."""
        if "--plan" in args and args[0].startswith("-"):
            args = ["plan", *(one for one in args if one != "--plan")]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_PlanFlag,
    no_args_is_help=True,
    help="Work out what speed to expect (--plan), and measure what is reached.",
)
bench.command("plan")(plan)
bench.command("kernels")(kernels)
bench.command("generate")(generate)
bench.command("engine")(engine)


@bench.callback()
def choose(
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print what to expect; short for the command `plan`: same options."
        ),
    ] = False,
) -> None:
    """Work out what speed to expect (--plan), and measure what is reached."""
