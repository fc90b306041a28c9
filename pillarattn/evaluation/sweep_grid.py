"""A sweep's cells: what all share, a grid of what varies, and single cells besides."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pillarattn.evaluation.eval_config import EvalConfig

KEYS = ("name", "about", "base", "grid", "cells")
SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def read_sweep(path: str | Path) -> dict[str, Any]:
    """Return what a YAML, JSON or TOML file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another suffix, a syntax error, or no mapping at the top.
    """
    where = Path(path)
    if not where.is_file():
        raise FileNotFoundError(f"sweep file {str(where)!r} does not exist")
    text = where.read_text(encoding="utf-8")
    suffix = where.suffix.lower()
    try:
        if suffix == ".json":
            values = json.loads(text)
        elif suffix == ".toml":
            values = tomllib.loads(text)
        elif suffix in (".yaml", ".yml"):
            values = _read_yaml(text)
        else:
            raise ValueError(f"a sweep file ends with {', '.join(SUFFIXES)}, got {where.name!r}")
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where}: a sweep is a mapping with the keys {', '.join(KEYS)}")
    return values


def expand(
    sweep: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None
) -> list[EvalConfig]:
    """Return a sweep's configs in a fixed order, each once.

    The grid's keys vary as nested loops do, the last one fastest. A key `options.NAME` sets a field
    of `options`. Entries of `cells` come after the grid; each starts from `base`.

    Args:
        sweep: a mapping with `base`, `grid`, `cells`; `name` and `about` are for people.
        overrides: fields that every cell gets in the end, such as a data path.

    Raises:
        ValueError: an unknown key, an empty grid axis, a value out of range (the message names the
            cell), or no cell at all.
    """
    unknown = sorted(set(sweep) - set(KEYS))
    if unknown:
        raise ValueError(
            f"unknown key {', '.join(map(repr, unknown))} in the sweep; known: {', '.join(KEYS)}"
        )
    base = _mapping(sweep, "base")
    grid = _mapping(sweep, "grid")
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"grid axis {name!r} must be a list of values, got {values!r}")
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if not grid:
        points = []
    cells = sweep.get("cells") or []
    if not isinstance(cells, Sequence) or not all(isinstance(cell, Mapping) for cell in cells):
        raise ValueError(f"cells must be a list of mappings, got {cells!r}")
    points += [dict(cell) for cell in cells]
    if not points:
        points = [{}]
    found: dict[str, EvalConfig] = {}
    for point in points:
        config = _config(base, point, overrides or {})
        found.setdefault(config.hash, config)
    return list(found.values())


def _config(
    base: Mapping[str, Any], point: Mapping[str, Any], overrides: Mapping[str, Any]
) -> EvalConfig:
    values: dict[str, Any] = {}
    for source in (base, point, overrides):
        for name, value in source.items():
            head, dot, field = name.partition(".")
            if dot and head == "options":
                values["options"] = {**values.get("options", {}), field: value}
            elif name == "options":
                if not isinstance(value, Mapping):
                    raise ValueError(f"options must be a mapping, got {value!r}")
                values["options"] = {**values.get("options", {}), **value}
            else:
                values[name] = value
    try:
        return EvalConfig.from_dict(values)
    except ValueError as error:
        where = f" in the cell {dict(point)}" if point else ""
        raise ValueError(f"{error}{where}") from None


def _mapping(sweep: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    values = sweep.get(key) or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{key} must be a mapping, got {values!r}")
    return values


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None
