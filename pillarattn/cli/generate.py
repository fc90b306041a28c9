"""`pillarattn generate`: one prompt, plainly and speculatively, with times and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pillarattn import SelfSpeculativeGenerator, __version__, patch
from pillarattn.cli.console import (
    check_json_target,
    human_console,
    readable_errors,
    write_json,
)
from pillarattn.cli.live_text import LiveText
from pillarattn.cli.option_types import (
    Device,
    DraftsOrAuto,
    Dtype,
    JsonTarget,
    MinBudget,
    ModelName,
    Plain,
    SamplingTemperature,
    ShareOrAuto,
    StrategyName,
)
from pillarattn.cli.option_values import parse_value
from pillarattn.cli.result_tables import show_comparison, show_strategies, show_verdict
from pillarattn.evaluation.comparison import Comparison, compare
from pillarattn.evaluation.demo_model import load_model, resolve_device, resolve_dtype
from pillarattn.evaluation.environment import environment
from pillarattn.evaluation.strategy_acceptance import strategy_acceptance
from pillarattn.evaluation.tasks.worked_maths import worked_maths
from pillarattn.modules.strategies import STRATEGIES

DEMO_STRATEGIES = "pillar,streaming,oracle,uniform"
STRATEGY_TOKENS = 32
SCHEMA = 1


Prompt = Annotated[str | None, typer.Option(help="The text to continue.")]
PromptFile = Annotated[Path | None, typer.Option(help="A file with the text to continue.")]
Demo = Annotated[
    bool, typer.Option("--demo", help="Continue worked mathematics that the library writes.")
]
DemoTokens = Annotated[int, typer.Option(help="Length of the demo's text, in tokens.")]
NewTokens = Annotated[int, typer.Option(help="Tokens to generate.")]
SharedSeed = Annotated[
    int | None,
    typer.Option(help="Sample the same tokens on every run, which also lets plain be compared."),
]
Compared = Annotated[
    str | None,
    typer.Option(
        help="Also measure the acceptance of these strategies on the same text, greedily "
        f"(default with --demo: {DEMO_STRATEGIES}; '' for none).",
    ),
]


def generate(
    model: ModelName = "smollm2",
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    demo: Demo = False,
    prompt_tokens: DemoTokens = 2500,
    max_new_tokens: NewTokens = 128,
    k: DraftsOrAuto = "8",
    s: ShareOrAuto = "0.05",
    strategy: StrategyName = "pillar",
    min_budget: MinBudget = 128,
    temperature: SamplingTemperature = 0.0,
    seed: SharedSeed = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    plain: Plain = True,
    strategies: Compared = None,
    json_to: JsonTarget = None,
) -> None:
    """Generate by sparse self-speculation, and show what it cost and whether it is lossless."""
    console = human_console(json_to)
    with readable_errors():
        check_json_target(json_to)
        _check_numbers(max_new_tokens, prompt_tokens, temperature)
        assistant = SelfSpeculativeGenerator(
            k=parse_value(k), s=parse_value(s), strategy=strategy, min_budget=min_budget, seed=seed
        )
        names = _strategies_to_measure(strategies, demo)
        text = _given_prompt(prompt, prompt_file, demo)
        where, _ = resolve_device(device), resolve_dtype(dtype)
        _header(console, model, str(where), dtype, assistant)
        loaded, tokenizer = _load(console, model, device=str(where), dtype=dtype)
        text = worked_maths(prompt_tokens, tokenizer) if text is None else text
        inputs = _tokenized(tokenizer, text, where)
    # Past this point a ValueError is a bug of ours, except for those that name an option.
    console.print(f"Prompt: {inputs['input_ids'].shape[1]} tokens. It ends with:")
    console.print(_tail(text), style="dim", markup=False)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    result = _compare(console, loaded, tokenizer, inputs, assistant, max_new_tokens, plain, options)
    records = _measure(console, loaded, inputs, assistant, names, max_new_tokens)
    _show(console, result, records, strategy)
    record = {"schema": SCHEMA, "command": "generate", "model": model, "dtype": dtype}
    record |= {"temperature": temperature, **result.to_dict(), "strategies": records}
    write_json(record | {"text": tokenizer.decode(result.tokens)}, json_to)


def _strategies_to_measure(strategies: str | None, demo: bool) -> list[str]:
    """Return the names that the user listed, or the demo's own."""
    wanted = DEMO_STRATEGIES if strategies is None and demo else strategies or ""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        STRATEGIES.get(name)
    return names


def _load(console: Console, model: str, *, device: str, dtype: str) -> tuple[Any, Any]:
    """Return the model, patched, and its tokenizer."""
    with console.status("loading"):
        _plain_line(console, "Loading the model ...")
        loaded, tokenizer = load_model(model, device=device, dtype=dtype)
        return patch(loaded, join_weights=loaded.device.type == "cuda"), tokenizer


def _tokenized(tokenizer: Any, text: str, device: Any) -> dict[str, Any]:
    """Return the prompt as `generate` takes it."""
    inputs = tokenizer(text, return_tensors="pt").to(device)
    if not inputs["input_ids"].numel():
        raise ValueError("the prompt has no tokens; give some text")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def _compare(
    console: Console,
    model: Any,
    tokenizer: Any,
    inputs: dict[str, Any],
    assistant: SelfSpeculativeGenerator,
    max_new_tokens: int,
    plain: bool,
    options: dict[str, Any],
) -> Comparison:
    headings = {"plain": "Plain decoding", "speculative": f"Speculative decoding, {assistant!r}"}

    def streamer_for(run: str) -> LiveText:
        console.print(f"\n{headings[run]} (prefill first):", style="bold", markup=False)
        return LiveText(tokenizer, console)

    return compare(
        model,
        inputs,
        assistant,
        max_new_tokens=max_new_tokens,
        plain=plain,
        streamer_for=streamer_for,
        **options,
    )


def _measure(
    console: Console,
    model: Any,
    inputs: dict[str, Any],
    assistant: SelfSpeculativeGenerator,
    names: list[str],
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """Return the acceptance of each strategy on the same text."""
    if not names:
        return []
    console.print(f"\nMeasuring acceptance: {', '.join(names)} ...")
    return strategy_acceptance(
        model,
        inputs,
        assistant.config,
        names,
        max_new_tokens=min(STRATEGY_TOKENS, max_new_tokens),
    )


def _show(
    console: Console, result: Comparison, records: list[dict[str, Any]], strategy: str
) -> None:
    console.print()
    show_comparison(console, result, strategy)
    if records:
        show_strategies(console, records)
    show_verdict(console, result)


def _check_numbers(max_new_tokens: int, prompt_tokens: int, temperature: float) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    if prompt_tokens < 1:
        raise ValueError(f"--prompt-tokens must be at least 1, got {prompt_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"--temperature must be 0 (greedy) or a positive number, got {temperature}"
        )


def _given_prompt(prompt: str | None, prompt_file: Path | None, demo: bool) -> str | None:
    """Return the user's text, or None for the demo's own."""
    given = [prompt is not None, prompt_file is not None, demo]
    if sum(given) != 1:
        raise ValueError("give exactly one of --prompt TEXT, --prompt-file FILE and --demo")
    if prompt_file is not None:
        if not prompt_file.is_file():
            raise ValueError(f"--prompt-file: {str(prompt_file)!r} is not a file")
        return prompt_file.read_text(encoding="utf-8")
    return prompt


def _header(
    console: Console, model: str, device: str, dtype: str, assistant: SelfSpeculativeGenerator
) -> None:
    about = environment(device)
    versions = about["versions"]
    console.print(f"[bold]{model}[/bold] on {about['device_name']} ({device}, {dtype})")
    console.print(
        f"pillarattn {__version__}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {about['threads']} CPU threads"
    )


def _plain_line(console: Console, text: str) -> None:
    # A terminal shows the spinner instead.
    if not console.is_terminal:
        console.print(text)


def _tail(text: str, lines: int = 3) -> str:
    return "\n".join(text.splitlines()[-lines:])[-400:]
