"""`pillarattn probe`: how many drafts of a text each strategy would get accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from pillarattn.cli.console import (
    check_json_target,
    human_console,
    readable_errors,
    write_json,
)
from pillarattn.cli.option_types import (
    Device,
    Dtype,
    Imports,
    JsonTarget,
    MinBudget,
    ModelName,
)
from pillarattn.cli.option_values import import_modules
from pillarattn.cli.probe_tables import show_lengths, show_positions, show_probe
from pillarattn.config import PARITY_CHOICES, PillarConfig
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.evaluation.demo_model import load_model, resolve_device, resolve_dtype
from pillarattn.evaluation.probe import acceptance_probe
from pillarattn.evaluation.probe_text import problem_text, token_ids
from pillarattn.evaluation.tasks.worked_maths import worked_maths
from pillarattn.modules.strategies import STRATEGIES

DEFAULT_STRATEGIES = "pillar,streaming,quest,oracle,uniform"
_D = PillarConfig()


TextFile = Annotated[Path | None, typer.Option(help="A file with the text to probe.")]
Dataset = Annotated[
    Path | None,
    typer.Option(
        help="A JSONL file of problems with solutions (fields question or problem, and "
        "solution), joined to one text. Without --text and --dataset: worked mathematics that "
        "the library writes."
    ),
]
Tokens = Annotated[int, typer.Option(help="Take the first tokens of the text.")]
PromptEnd = Annotated[int, typer.Option(help="Tokens of the prompt; the first round begins there.")]
StrategyNames = Annotated[
    str, typer.Option(help=f"Strategies, with commas, of {', '.join(STRATEGIES.names())}.")
]
DraftsList = Annotated[str, typer.Option(help="Tokens drafted per round; several with commas.")]
ShareList = Annotated[
    str, typer.Option(help="Share of the context that a draft may read; several with commas.")
]
ProbeTemperature = Annotated[
    float, typer.Option(help="Of draft and target; 0 compares their most likely tokens.")
]
Recent = Annotated[int, typer.Option(help="Newest tokens that every selection keeps.")]
Sink = Annotated[int, typer.Option(help="First tokens that every selection keeps.")]
Parity = Annotated[
    str, typer.Option(help=f"{' or '.join(PARITY_CHOICES)}: select as the paper's code does.")
]
Positions = Annotated[
    bool, typer.Option("--positions", help="Also show acceptance by draft position.")
]
PerRound = Annotated[
    bool, typer.Option("--per-round", help="Keep each round's figures in the record.")
]
SaveTo = Annotated[
    Path | None, typer.Option(help="Write the record as JSON Lines, one line a strategy.")
]


def probe(
    model: ModelName = "smollm2",
    text: TextFile = None,
    dataset: Dataset = None,
    tokens: Tokens = 2048,
    start: PromptEnd = 1024,
    strategies: StrategyNames = DEFAULT_STRATEGIES,
    k: DraftsList = "8",
    s: ShareList = "0.05",
    temperature: ProbeTemperature = 0.6,
    min_budget: MinBudget = _D.min_budget,
    recent: Recent = _D.recent,
    sink: Sink = _D.sink,
    parity: Parity = _D.parity,
    device: Device = "auto",
    dtype: Dtype = "float32",
    import_: Imports = None,
    positions: Positions = False,
    per_round: PerRound = False,
    save: SaveTo = None,
    json_to: JsonTarget = None,
) -> None:
    """Measure acceptance on a given text, teacher-forced: nothing is generated or sampled."""
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        import_modules(import_ or ())
        configs = [
            PillarConfig(
                strategy=name,
                k=drafts,
                s=share,
                min_budget=min_budget,
                recent=recent,
                sink=sink,
                parity=parity,
            )
            for drafts, share, name in product(
                _integers("--k", k), _numbers("--s", s), _names(strategies)
            )
        ]
        for config in configs:
            SelfSpeculativeGenerator.from_config(config)
        words = text_of(text, dataset)
        where, _ = resolve_device(device), resolve_dtype(dtype)
        console.print(f"Loading {model} ...", markup=False)
        loaded, tokenizer = load_model(model, device=str(where), dtype=dtype)
        if words is None:
            words = worked_maths(tokens, tokenizer)
        ids = token_ids(words, tokenizer, max_tokens=tokens)
        console.print(
            f"{len(ids)} tokens, rounds from {start} on, temperature {temperature:g}, "
            f"{len(configs)} configuration{'s' if len(configs) > 1 else ''} on {where} ({dtype})"
        )
        with progress_bar(console, "probing") as advance:
            table = acceptance_probe(
                loaded,
                ids,
                configs,
                temperature=temperature,
                start=start,
                per_round=per_round,
                on_progress=advance,
            )
    table.about |= {"model": model, "text": str(text or dataset or "worked_maths")}
    show_probe(console, table)
    if positions:
        show_positions(console, table)
    show_lengths(console, table)
    if save is not None:
        console.print(f"Saved {table.save(save)}", markup=False)
    write_json(table.to_dict(), json_to)


def text_of(text: Path | None, dataset: Path | None) -> str | None:
    """Return the text of a file or a problem set; None if neither was given."""
    if text is not None and dataset is not None:
        raise ValueError("give --text or --dataset, not both")
    for option, path in (("--text", text), ("--dataset", dataset)):
        if path is not None and not path.is_file():
            raise ValueError(f"{option}: {str(path)!r} is not a file")
    if dataset is not None:
        return problem_text(dataset)
    return None if text is None else text.read_text(encoding="utf-8")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("--strategies names none")
    return names


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas, got {text!r}") from None


def _integers(option: str, text: str) -> list[int]:
    numbers = _numbers(option, text)
    if not all(number.is_integer() for number in numbers):
        raise ValueError(f"{option} takes whole numbers with commas, got {text!r}")
    return [int(number) for number in numbers]


@contextmanager
def progress_bar(console: Console, what: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal; yield what tells it the share that is done."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share: bar.update(task, completed=share)
