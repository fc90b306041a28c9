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
from pillarattn.modules.strategies import STRATEGIES

_D = EvalConfig()


def evaluate(
    model: Annotated[
        str, typer.Option(help="smollm2 (built in), a checkpoint folder, or a hub name.")
    ] = _D.model,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS.names())}.")] = _D.task,
    data: Annotated[
        str | None,
        typer.Option(
            help="A local JSONL file, a folder that holds TASK.jsonl, or a hub name; left out: the "
            "task's own data."
        ),
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Subset of a hub data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set.")] = None,
    start: Annotated[int, typer.Option(help="First problem of the data to take.")] = _D.start,
    n: Annotated[int, typer.Option("--n", "-n", help="Problems to take.")] = _D.n,
    chat: Annotated[
        bool | None,
        typer.Option(help="Use the chat template; left out: if the tokenizer has one."),
    ] = None,
    context_tokens: Annotated[
        int,
        typer.Option(help="Put solved problems in front, within so many tokens; 0 puts none."),
    ] = _D.context_tokens,
    k: Annotated[int, typer.Option(help="Tokens drafted per round; 0 is plain decoding.")] = _D.k,
    s: Annotated[
        float, typer.Option(help="Share of the context that a draft may read, 0 < s <= 1.")
    ] = _D.s,
    strategy: Annotated[
        str, typer.Option(help=f"What chooses the keys: {', '.join(STRATEGIES.names())}.")
    ] = str(_D.strategy),
    drafter: Annotated[
        str,
        typer.Option(help="Who proposes tokens; a chain is a list with commas, cheapest first."),
    ] = str(_D.drafter),
    acceptance: Annotated[
        str, typer.Option(help="How drafts are judged; auto is exact for greedy and sampling.")
    ] = _D.acceptance,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Any other field of PillarConfig, NAME=VALUE, such as min_budget=64."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; above 0 samples.")
    ] = _D.temperature,
    top_p: Annotated[float, typer.Option(help="Nucleus of sampling; 1 is all.")] = _D.top_p,
    top_k: Annotated[int, typer.Option(help="Tokens to sample from; 0 is all.")] = _D.top_k,
    seed: Annotated[int, typer.Option(help="Seed of the sampling noise.")] = _D.seed,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens to generate per problem.")
    ] = _D.max_new_tokens,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens whatever is said.")
    ] = _D.ignore_eos,
    batch_size: Annotated[int, typer.Option(help="Problems decoded together.")] = _D.batch_size,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = _D.device,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = _D.dtype,
    plain: Annotated[
        bool, typer.Option("--plain/--no-plain", help="Run plain decoding too, for the speed-up.")
    ] = _D.plain,
    lossless: Annotated[
        str, typer.Option(help=f"What to check: {', '.join(LOSSLESS_CHECKS)}.")
    ] = _D.lossless,
    recall_tokens: Annotated[
        int,
        typer.Option(
            help="New tokens on which attention-mass recall is measured; 0 measures none."
        ),
    ] = _D.recall_tokens,
    allow_code_execution: Annotated[
        bool,
        typer.Option(
            "--allow-code-execution",
            help="Run programs that the model writes, with your rights and a time limit: "
            "livecodebench is not scored without it. Use a container.",
        ),
    ] = False,
    import_: Annotated[
        list[str] | None,
        typer.Option("--import", help="A Python module that registers a strategy or a task."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Append the record to this JSONL file, for `report`.")
    ] = None,
    keep_texts: Annotated[
        bool, typer.Option("--keep-texts", help="Keep the generated texts in the record.")
    ] = False,
    json_to: Annotated[
        str | None, typer.Option("--json", help="Write the record as JSON to a file, or to - .")
    ] = None,
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
