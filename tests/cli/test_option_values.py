"""Typed values: numbers, words, pairs and axes; and names that must exist."""

from __future__ import annotations

import sys

import pytest

from pillarattn.cli.option_values import (
    check_names,
    import_modules,
    parse_axes,
    parse_pairs,
    parse_parts,
    parse_value,
)
from pillarattn.errors import UnknownNameError
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.modules.strategies import STRATEGIES


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0.05", 0.05), ("true", True), ("null", None), ("auto", "auto"), ("[1,2]", [1, 2])],
)
def test_a_value_is_what_it_looks_like(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_parts():
    assert parse_parts("sparse") == "sparse"
    assert parse_parts("ngram,sparse") == ["ngram", "sparse"]
    assert parse_parts('[{"name": "ngram", "max_n": 3}, "sparse"]') == [
        {"name": "ngram", "max_n": 3},
        "sparse",
    ]


def test_pairs():
    assert parse_pairs(["min-budget=64", "a = b=c"], "--option") == {"min_budget": 64, "a": "b=c"}
    for wrong in ("min_budget", "=4"):
        with pytest.raises(ValueError, match="--option takes NAME=VALUE"):
            parse_pairs([wrong], "--option")


def test_axes():
    axes = parse_axes(["k=4,8", "strategy=pillar, full", 'drafter=["sparse",["a","b"]]'], "--grid")
    assert axes == {
        "k": [4, 8],
        "strategy": ["pillar", "full"],
        "drafter": ["sparse", ["a", "b"]],
    }
    for wrong in ("k", "k=", "=4"):
        with pytest.raises(ValueError, match="--grid takes NAME=VALUE,VALUE"):
            parse_axes([wrong], "--grid")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "best"}, "unknown strategy 'best'"),
        ({"task": "best"}, "unknown task 'best'"),
        ({"drafter": "best"}, "drafter"),
        ({"device": "tpu9"}, "device must be"),
        ({"dtype": "int8"}, "dtype must be"),
    ],
)
def test_names_must_exist(values, message):
    with pytest.raises(ValueError, match=message):
        check_names(EvalConfig(**values))


def test_a_local_file_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl' does not exist"):
        check_names(EvalConfig(data=str(tmp_path / "a.jsonl")))
    check_names(EvalConfig(data="someone/data"))


def test_a_module_can_register_a_strategy(tmp_path, monkeypatch):
    (tmp_path / "my_strategies.py").write_text(
        "import pillarattn\n"
        "from pillarattn.modules.strategies import FullStrategy\n"
        '@pillarattn.register_strategy("of_mine")\n'
        "class Mine(FullStrategy):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UnknownNameError):
        check_names(EvalConfig(strategy="of_mine"))
    import_modules(["my_strategies"])
    try:
        check_names(EvalConfig(strategy="of_mine"))
    finally:
        del STRATEGIES._classes["of_mine"], sys.modules["my_strategies"]
    with pytest.raises(ImportError, match="no_such_module"):
        import_modules(["no_such_module"])
