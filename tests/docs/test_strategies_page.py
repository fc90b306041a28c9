"""The Python blocks of docs/strategies.md run from top to bottom, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pillarattn
from pillarattn.modules.strategies import STRATEGIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"


@pytest.fixture(autouse=True)
def own_names_only():
    """Hide what other tests have registered, and forget what the page registers."""
    before = dict(STRATEGIES._classes)
    STRATEGIES._classes.clear()
    own = {n: cls for n, cls in before.items() if cls.__module__.startswith("pillarattn.")}
    STRATEGIES._classes.update(own)
    yield
    STRATEGIES._classes.clear()
    STRATEGIES._classes.update(before)


def test_the_blocks_run(monkeypatch, capsys):
    from pillarattn import evaluation
    from pillarattn.evaluation.notebook_model import notebook_model

    monkeypatch.setattr(evaluation, "load_model", lambda name: notebook_model(tiny=True))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)
    shown = capsys.readouterr().out
    assert shown.count("lossless (greedy): 16 new tokens in 1 row") == 2
    assert "averaged" in shown and "union" in shown


def test_every_strategy_has_a_line_in_the_table():
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == STRATEGIES.names()


def test_the_flags_of_the_page_exist():
    text = PAGE.read_text(encoding="utf-8")
    for flag in re.findall(r"`(needs_\w+|refresh\w*|seed_rows)", text):
        assert hasattr(pillarattn.Strategy, flag), flag
