"""`pillarattn info`: what is installed, and whether a model can be decoded losslessly."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from pillarattn import __version__, kernels
from pillarattn.cli.console import (
    check_json_target,
    human_console,
    readable_errors,
    write_json,
)
from pillarattn.cli.option_types import JsonTarget
from pillarattn.evaluation.demo_model import has_demo_model, load_config, resolve_device
from pillarattn.evaluation.environment import environment
from pillarattn.kernels.dispatch import implementations
from pillarattn.modules.strategies import STRATEGIES
from pillarattn.patch.known_architectures import look_up
from pillarattn.patch.support import describe

# Verdicts, each ruling out more than the one before; unknown gives way to all.
_CAUTION = ("unknown", "lossless", "lossless-dense-draft", "refused")


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help="smollm2, a checkpoint folder, a hub name, or a model type such as qwen3: only "
            "its config is read, no weights.",
        ),
    ] = None,
    json_to: JsonTarget = None,
) -> None:
    """Show versions, device, kernels and strategies, and how a model would be decoded."""
    with readable_errors():
        check_json_target(json_to)
        facts = _facts()
        if model is not None:
            facts["model"] = {"name": model, **_describe(model)}
    _show(human_console(json_to), facts)
    write_json(facts, json_to)


def _facts() -> dict[str, Any]:
    here = environment(resolve_device("auto"))
    # A checkout that was not installed has no metadata to ask.
    here["versions"]["pillarattn"] = __version__
    return {
        **here,
        "kernels": {op: implementations(op) for op in kernels.__all__ if implementations(op)},
        "strategies": STRATEGIES.names(),
        "demo_model": has_demo_model(),
    }


def _describe(name: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = load_config(name)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        # Families check their fields with error classes of their own.
        raise ValueError(f"the config of {name!r} is not valid: {error}") from None
    row: dict[str, Any] = {"model_type": config.model_type}
    builders = (AutoModelForCausalLM, AutoModelForImageTextToText)
    builder = next((auto for auto in builders if type(config) in auto._model_mapping), None)
    if builder is None and not hasattr(config, "auto_map"):
        reason = f"transformers has no causal language model of type {config.model_type!r}"
        return row | {"verdict": "refused", "reason": reason}
    try:
        # On the meta device a model of any size has its structure but no weights.
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = (builder or AutoModelForCausalLM).from_config(config)
        row = describe(model)
    except Exception as error:
        # Each family's constructor fails in its own way on a config that it cannot build.
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        row |= {"verdict": "unknown", "reason": f"it cannot be built from this config: {line}"}
    return _with_known(row)


def _with_known(row: dict[str, Any]) -> dict[str, Any]:
    """Add what the config alone cannot tell: the suite has measured a tiny model of the type."""
    known = look_up(row["model_type"])
    if known is None:
        return row
    remarks = list(known["notes"])
    # What this very config rules out stays ruled out.
    if _CAUTION.index(known["verdict"]) > _CAUTION.index(row["verdict"]):
        if row["verdict"] == "unknown":
            remarks.append(row["reason"])
        row.update(verdict=known["verdict"], reason=known["reason"])
        if "sparse_layers" in row:
            row["sparse_layers"] = 0
    row["remarks"] = "; ".join(remarks) or None
    row["tested"] = f"tiny random model, transformers {known['transformers']}"
    return row


def _show(console: Console, facts: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for package, version in facts["versions"].items():
        table.add_row(package, version or "not installed")
    table.add_row("device", f"{facts['device_name']} ({facts['device']})")
    table.add_row("CPU threads", str(facts["threads"]))
    table.add_row("strategies", ", ".join(facts["strategies"]))
    for op, names in facts["kernels"].items():
        table.add_row(f"kernel {op}", ", ".join(names))
    table.add_row("built-in model", "installed" if facts["demo_model"] else "not installed")
    console.print(table)
    if "model" in facts:
        row = Table(show_header=False, title=facts["model"]["name"])
        for key, value in facts["model"].items():
            if key != "name" and not (key == "reason" and value is None):
                row.add_row(key, "none" if value is None else str(value))
        console.print(row)
