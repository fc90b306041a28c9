"""`pillarattn evaluate`: one task, one setting: answers, acceptance, speed and losslessness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pillarattn.cli.console import (
    check_json_target,
    human_console,
    readable_errors,
    write_json,
)
from pillarattn.cli.evaluation_tables import show_record
from pillarattn.cli.option_types import (
    AllowCode,
    Device,
    Drafts,
    Dtype,
    Imports,
    JsonTarget,
    KeepTexts,
    ModelName,
    Plain,
    SamplingTemperature,
    Share,
    StrategyName,
)
from pillarattn.cli.option_values import (
    check_names,
    import_modules,
    parse_pairs,
    parse_parts,
    parse_value,
)
from pillarattn.evaluation.eval_config import LOSSLESS_CHECKS, EvalConfig
from pillarattn.evaluation.results import append_record
from pillarattn.evaluation.runner import Runner
from pillarattn.evaluation.tasks import TASKS

_D = EvalConfig()

TaskName = Annotated[str, typer.Option(help=f"One of {', '.join(TASKS.names())}.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="A local JSONL file, a folder that holds TASK.jsonl, or a hub name; left out: the "
        "task's own data."
    ),
]
Subset = Annotated[str | None, typer.Option(help="Subset of a hub data set.")]
Split = Annotated[str | None, typer.Option(help="Split of a hub data set.")]
First = Annotated[int, typer.Option(help="First problem of the data to take.")]
Problems = Annotated[int, typer.Option("--n", "-n", help="Problems to take.")]
Chat = Annotated[
    bool | None, typer.Option(help="Use the chat template; left out: if the tokenizer has one.")
]
ContextTokens = Annotated[
    int, typer.Option(help="Put solved problems in front, within so many tokens; 0 puts none.")
]
DrafterName = Annotated[
    str, typer.Option(help="Who proposes tokens; a chain is a list with commas, cheapest first.")
]
Acceptance = Annotated[
    str, typer.Option(help="How drafts are judged; auto is exact for greedy and sampling.")
]
OtherFields = Annotated[
    list[str] | None,
    typer.Option(help="Any other field of PillarConfig, NAME=VALUE, such as min_budget=64."),
]
TopP = Annotated[float, typer.Option(help="Nucleus of sampling; 1 is all.")]
TopK = Annotated[int, typer.Option(help="Tokens to sample from; 0 is all.")]
Seed = Annotated[int, typer.Option(help="Seed of the sampling noise.")]
NewTokens = Annotated[int, typer.Option(help="Tokens to generate per problem.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens whatever is said.")
]
BatchSize = Annotated[int, typer.Option(help="Problems decoded together.")]
Lossless = Annotated[str, typer.Option(help=f"What to check: {', '.join(LOSSLESS_CHECKS)}.")]
RecallTokens = Annotated[
    int,
    typer.Option(help="New tokens on which attention-mass recall is measured; 0 measures none."),
]
AppendTo = Annotated[
    Path | None, typer.Option(help="Append the record to this JSONL file, for `report`.")
]


def evaluate(
    model: ModelName = _D.model,
    task: TaskName = _D.task,
    data: Data = None,
    subset: Subset = None,
    split: Split = None,
    start: First = _D.start,
    n: Problems = _D.n,
    chat: Chat = None,
    context_tokens: ContextTokens = _D.context_tokens,
    k: Drafts = _D.k,
    s: Share = _D.s,
    strategy: StrategyName = str(_D.strategy),
    drafter: DrafterName = str(_D.drafter),
    acceptance: Acceptance = _D.acceptance,
    option: OtherFields = None,
    temperature: SamplingTemperature = _D.temperature,
    top_p: TopP = _D.top_p,
    top_k: TopK = _D.top_k,
    seed: Seed = _D.seed,
    max_new_tokens: NewTokens = _D.max_new_tokens,
    ignore_eos: IgnoreEos = _D.ignore_eos,
    batch_size: BatchSize = _D.batch_size,
    device: Device = _D.device,
    dtype: Dtype = _D.dtype,
    plain: Plain = _D.plain,
    lossless: Lossless = _D.lossless,
    recall_tokens: RecallTokens = _D.recall_tokens,
    allow_code_execution: AllowCode = False,
    import_: Imports = None,
    out: AppendTo = None,
    keep_texts: KeepTexts = False,
    json_to: JsonTarget = None,
) -> None:
    """Run a task with one setting, and show answers, acceptance, speed and the verdict."""
    console = human_console(json_to)
    runner = Runner(keep_texts=keep_texts)
    with readable_errors():
        check_json_target(json_to)
        import_modules(import_ or [])
        values: dict[str, Any] = {
            "model": model, "task": task, "data": data, "subset": subset, "split": split,
            "start": start, "n": n, "chat": chat, "context_tokens": context_tokens,
            "k": k, "s": s, "strategy": parse_value(strategy),
            "drafter": parse_parts(drafter),
            "acceptance": acceptance, "options": parse_pairs(option or [], "--option"),
            "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
            "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos,
            "batch_size": batch_size, "device": device, "dtype": dtype, "plain": plain,
            "lossless": lossless, "recall_tokens": recall_tokens,
            "run_code": allow_code_execution,
        }  # fmt: skip
        config = EvalConfig.from_dict(values)
        check_names(config)
        console.print(f"{config.label}: loading {config.model} ...", markup=False)
        runner.check(config)
    # Past this point a ValueError is a bug of ours.
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("batches", total=None)
        record = runner.run(
            config, on_batch=lambda done, total: progress.update(bar, completed=done, total=total)
        )
    show_record(console, record)
    if out is not None:
        append_record(out, record)
        console.print(f"appended to {out}", markup=False)
    write_json(record, json_to)
