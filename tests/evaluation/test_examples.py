"""The examples run as they stand, on a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pillarattn.modules.strategies import STRATEGIES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_quickstart(byte_checkpoint, capsys):
    load("quickstart").main(str(byte_checkpoint))
    printed = capsys.readouterr().out
    assert "same tokens as plain decoding: True" in printed
    assert "drafts accepted" in printed


def test_custom_strategy(byte_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(STRATEGIES, "_classes", dict(STRATEGIES._classes))
    load("custom_strategy").main(str(byte_checkpoint))
    printed = capsys.readouterr().out
    for name in ("decayed", "pillar", "streaming"):
        assert f"{name}: " in printed
    assert "lossless (greedy): 32 new tokens in 1 row, identical" in printed


def test_evaluate(byte_checkpoint, capsys):
    load("evaluate").main(str(byte_checkpoint))
    printed = capsys.readouterr().out
    assert "drafts accepted in a round" in printed
    assert "lossless (greedy): 128 new tokens in 2 rows" in printed


def test_sweep_then_report(byte_checkpoint, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    example = load("sweep")
    example.SWEEP["base"] |= {"max_new_tokens": 12, "recall_tokens": 6, "context_tokens": 200}
    example.SWEEP["grid"] = {"strategy": ["pillar", "oracle"], "s": [0.05, 0.1]}
    example.main(str(tmp_path / "runs"), str(byte_checkpoint))
    assert capsys.readouterr().out.count("lossless (greedy)") == 4
    load("report").main(str(tmp_path / "runs"), str(tmp_path / "report"))
    assert (tmp_path / "report" / "report.html").exists()
    assert (tmp_path / "report" / "pillar-and-bounds.pdf").read_bytes().startswith(b"%PDF")
