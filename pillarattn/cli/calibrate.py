"""`pillarattn calibrate`: measure a model once, and write a config that uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pillarattn.cli.console import human_console, readable_errors
from pillarattn.cli.option_types import Device, Dtype, ModelName
from pillarattn.cli.probe import PromptEnd, TextFile, progress_bar, text_of
from pillarattn.config import PillarConfig
from pillarattn.evaluation.calibration import calibrate as measure
from pillarattn.evaluation.demo_model import load_model, resolve_device, resolve_dtype
from pillarattn.evaluation.probe_text import token_ids
from pillarattn.evaluation.tasks.worked_maths import worked_maths

_D = PillarConfig()


def calibrate(
    out: Annotated[
        Path,
        typer.Option(help="Folder for calibration.json and a pillar_config.json that uses it."),
    ],
    model: ModelName = "smollm2",
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Take the first tokens of the text.")] = 1536,
    start: PromptEnd = 1024,
    k: Annotated[int, typer.Option(help="Tokens drafted per round.")] = _D.k,
    s: Annotated[float, typer.Option(help="Share of the context that drafts may read.")] = _D.s,
    device: Device = "auto",
    dtype: Dtype = "float32",
) -> None:
    """Measure what each layer's missing keys cost acceptance, for strategy forecast.

    Any text of the kind that the model will write will do; nothing of the model is trained. Use the
    result by SelfSpeculativeGenerator.from_pretrained(OUT).
    """
    console = human_console(None)
    with readable_errors():
        words = text_of(text, None)
        where, _ = resolve_device(device), resolve_dtype(dtype)
        loaded, tokenizer = load_model(model, device=str(where), dtype=dtype)
        if words is None:
            words = worked_maths(tokens, tokenizer)
        ids = token_ids(words, tokenizer, max_tokens=tokens)
        with progress_bar(console, "calibrating") as on_progress:
            found = measure(
                loaded, ids, k=k, s=s, start=start, max_tokens=None, on_progress=on_progress
            )
        found = replace(found, model=model)
        found.save(out / "calibration.json")
        PillarConfig(k=k, s=s, strategy=found.strategy()).save_pretrained(out)
    table = Table(title=f"{found.tokens} tokens, k={k}, s={s}")
    for name in ("layer", "draft rejected", "attention missed", "weight"):
        table.add_column(name, justify="right")
    for layer, loss, dropped in zip(found.layers, found.loss, found.dropped, strict=True):
        weight = found.layer_weights[layer]
        table.add_row(str(layer), f"{loss:.2%}", f"{dropped:.1%}", f"{weight:.2f}")
    console.print(table)
    console.print(f"written: {out / 'calibration.json'}, {out / 'pillar_config.json'}")
