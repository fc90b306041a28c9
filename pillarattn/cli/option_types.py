"""Options that several commands take, each with its one help text."""

from __future__ import annotations

from typing import Annotated

import typer

from pillarattn.modules.strategies import STRATEGIES

ModelName = Annotated[
    str, typer.Option(help="smollm2 (built in), a checkpoint folder, or a hub name.")
]
Drafts = Annotated[int, typer.Option(help="Tokens drafted per round; 0 is plain decoding.")]
DraftsOrAuto = Annotated[
    str,
    typer.Option(
        help="Tokens drafted per round; 0 is plain decoding, auto what pays best by measured times."
    ),
]
Share = Annotated[
    float, typer.Option(help="Share of the context that a draft may read, 0 < s <= 1.")
]
ShareOrAuto = Annotated[
    str,
    typer.Option(
        help="Share of the context that a draft may read, 0 < s <= 1; auto, with --k auto, what "
        "pays best."
    ),
]
StrategyName = Annotated[
    str, typer.Option(help=f"What chooses the keys: {', '.join(STRATEGIES.names())}.")
]
MinBudget = Annotated[
    int, typer.Option(help="Keys per KV head that a draft may always read, in tokens.")
]
SamplingTemperature = Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Plain = Annotated[
    bool, typer.Option("--plain/--no-plain", help="Run plain decoding too, for the speed-up.")
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="A Python module that registers a strategy or a task."),
]
KeepTexts = Annotated[
    bool, typer.Option("--keep-texts", help="Keep the generated texts in the records.")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code-execution",
        help="Run programs that the model writes, with your rights and a time limit: "
        "livecodebench is not scored without it. Use a container.",
    ),
]
JsonTarget = Annotated[
    str | None, typer.Option("--json", help="Write the result as JSON to a file, or to - .")
]
