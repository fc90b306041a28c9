"""The examples of the engine run as they stand, on a tiny model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from pillarattn.evaluation.notebook_model import notebook_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def checkpoint(tmp_path):
    """Return a folder with a tiny random model that reads bytes."""
    model, tokenizer = notebook_model(tiny=True)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def example(name):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    spec = importlib.util.spec_from_file_location(f"{name}_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_many_requests(checkpoint, capsys):
    example("engine").main(checkpoint)
    printed = capsys.readouterr().out
    assert printed.count("of drafts accepted") == 3
    assert printed.count("sample 0") == 8
    assert "stream:" in printed


def test_rollouts(checkpoint, capsys):
    module = example("rollouts")
    module.main(checkpoint, 64)
    printed = capsys.readouterr().out
    assert printed.count("of 64 samples") == 3
    # Each prompt is computed once, and of their common beginning only the first one's.
    computed, asked = map(int, re.search(r"(\d+) of (\d+) prompt tokens", printed).groups())
    assert 0 < computed * 64 < asked
    assert re.search(r"\d+ new tokens in \d+ steps, [1-9]\d*% of drafts accepted", printed)


def test_advantages_are_of_the_group():
    advantages = example("rollouts").advantages
    assert advantages([1.0, 1.0]) == [0.0, 0.0]
    assert advantages([0.0, 0.0, 1.0, 1.0]) == [-1.0, -1.0, 1.0, 1.0]
