"""What the architecture suite found: one row for each model type and version of transformers."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import transformers

TABLE = "architectures.json"


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return `{"5.24": {"llama": {"verdict": ..., "reason": ..., "notes": ...}, ...}, ...}`.

    `tests/architectures/table.py` writes the file.
    """
    return json.loads((files("pillarattn.patch") / TABLE).read_text())


def look_up(model_type: str | None) -> dict[str, Any] | None:
    """Return the row of a model type, with the version it was found with; None if it is unknown.

    The installed version's row comes first, then the newest one's.
    """
    installed = ".".join(transformers.__version__.split(".")[:2])
    newest_first = sorted(table(), key=_numbers, reverse=True)
    for version in sorted(newest_first, key=lambda known: known != installed):
        row = table()[version].get(model_type or "")
        if row is not None:
            return {"transformers": version, **row}
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
