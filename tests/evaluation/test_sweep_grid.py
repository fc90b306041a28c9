"""Grids expand in order, each cell once, and a mistake names its cell."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.sweep_grid import expand, read_sweep

GRID = {"base": {"n": 2, "options": {"sink": 1}}, "grid": {"strategy": ["a", "b"], "k": [4, 8]}}


def test_the_last_axis_varies_fastest():
    cells = expand(GRID)
    assert [(c.strategy, c.k) for c in cells] == [("a", 4), ("a", 8), ("b", 4), ("b", 8)]
    assert all(c.n == 2 and c.options == {"sink": 1} for c in cells)


def test_single_cells_come_after_the_grid_and_nothing_twice():
    cells = expand({**GRID, "cells": [{"k": 16}, {"strategy": "b", "k": 8}, {"k": 16}]})
    assert len(cells) == 5
    assert (cells[4].k, cells[4].strategy) == (16, "pillar")


def test_options_can_be_axes_and_add_to_those_of_the_base():
    cells = expand({"base": {"options": {"sink": 1}}, "grid": {"options.recent": [0, 8]}})
    assert [c.options for c in cells] == [{"sink": 1, "recent": 0}, {"sink": 1, "recent": 8}]


def test_overrides_come_last():
    cells = expand(GRID, overrides={"n": 9, "options.sink": 3})
    assert all(c.n == 9 and c.options == {"sink": 3} for c in cells)


def test_no_grid_is_one_cell():
    assert expand({}) == [EvalConfig()]
    assert expand({"base": {"k": 2}}) == [EvalConfig(k=2)]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"gird": {}}, "unknown key 'gird' in the sweep; known: name, about, base, grid, cells"),
        ({"grid": {"k": []}}, "grid axis 'k' must be a list of values"),
        ({"grid": {"k": 8}}, "grid axis 'k' must be a list of values, got 8"),
        ({"grid": {"strategy": "pillar"}}, "grid axis 'strategy' must be a list"),
        ({"grid": [1]}, "grid must be a mapping"),
        ({"cells": {"k": 1}}, "cells must be a list of mappings"),
        ({"grid": {"k": [8], "s": [2]}}, r"0 < s <= 1, got 2.* in the cell \{'k': 8, 's': 2\}"),
        ({"base": {"budget": 2}}, "unknown option 'budget'"),
        ({"base": {"options": 3}}, "options must be a mapping"),
    ],
)
def test_a_mistake_is_named(sweep, message):
    with pytest.raises(ValueError, match=message):
        expand(sweep)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "name: x\ngrid:\n  k: [4, 8]\n"),
        ("a.json", '{"name": "x", "grid": {"k": [4, 8]}}'),
        ("a.toml", 'name = "x"\n[grid]\nk = [4, 8]\n'),
    ],
)
def test_three_formats_say_the_same(tmp_path, name, text):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(text)
    assert read_sweep(path) == {"name": "x", "grid": {"k": [4, 8]}}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "", "ends with .yaml, .yml, .json, .toml, got 'a.ini'"),
        ("a.json", "{", "a.json"),
        ("a.toml", "k =", "a.toml"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.json", "[1]", "a sweep is a mapping with the keys name"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sweep(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml' does not exist"):
        read_sweep(tmp_path / "none.yaml")
