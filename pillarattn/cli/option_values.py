"""Option values as people type them, and names that must be there before any work begins."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.evaluation.demo_model import resolve_device, resolve_dtype
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.tasks import TASKS
from pillarattn.evaluation.tasks.rows import LOCAL_SUFFIXES


def parse_value(text: str) -> Any:
    """Return a number, true, false, null or a JSON value where `text` is one, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Return whole numbers written with commas."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if not part.lstrip("-").isdigit():
            raise ValueError(f"{option} takes whole numbers with commas, got {text!r}")
        found.append(int(part))
    return tuple(dict.fromkeys(found))


def parse_parts(text: str) -> Any:
    """Return a name, a JSON value, or, of names with commas, their list."""
    value = parse_value(text)
    return text.split(",") if isinstance(value, str) and "," in value else value


def parse_pairs(pairs: Iterable[str], option: str) -> dict[str, Any]:
    """Return `name=value` texts as a mapping.

    Raises:
        ValueError: one has no `=`, or no name; the message names the option.
    """
    found = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not mark or not name.strip():
            raise ValueError(f"{option} takes NAME=VALUE, got {pair!r}")
        found[name.strip().replace("-", "_")] = parse_value(value.strip())
    return found


def parse_axes(pairs: Iterable[str], option: str) -> dict[str, list[Any]]:
    """Return `name=value,value,...` texts as grid axes; a value may be a JSON list.

    Raises:
        ValueError: as `parse_pairs`, or an axis is empty.
    """
    axes = {}
    for pair in pairs:
        name, mark, text = pair.partition("=")
        if not mark or not name.strip() or not text.strip():
            raise ValueError(f"{option} takes NAME=VALUE,VALUE,..., got {pair!r}")
        whole = parse_value(text)
        values = (
            whole if isinstance(whole, list) else [parse_value(v.strip()) for v in text.split(",")]
        )
        axes[name.strip().replace("-", "_")] = values
    return axes


def check_names(config: EvalConfig) -> None:
    """Raise if a config names something that does not exist, before anything is loaded.

    Raises:
        ValueError: unknown strategy, drafter, task, device or dtype.
        FileNotFoundError: `data` is a local file that is not there.
    """
    SelfSpeculativeGenerator.from_config(config.pillar_config())
    TASKS.get(config.task)
    resolve_device(config.device)
    resolve_dtype(config.dtype)
    data = config.data or ""
    if data.endswith(LOCAL_SUFFIXES) and not Path(data).is_file():
        raise FileNotFoundError(f"data file {data!r} does not exist")


def import_modules(names: Iterable[str]) -> None:
    """Import modules that register strategies or tasks; the working folder counts.

    Raises:
        ImportError: one cannot be imported.
    """
    here = str(Path.cwd())
    for name in names:
        if here not in sys.path:
            sys.path.insert(0, here)
        importlib.import_module(name)
