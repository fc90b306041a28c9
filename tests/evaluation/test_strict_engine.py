"""`benchmarks.strict_engine` on a tiny model: what it compares, and that differences end it."""

from __future__ import annotations

import json
import sys

import pytest

import pillarattn
from benchmarks import strict_engine
from pillarattn.evaluation.demo_model import load_model

SMALL = ["--batch", "3", "--length", "12", "--new-tokens", "8", "--alone", "2", "--k", "3",
         "--device", "cpu", "--dtype", "float32"]  # fmt: skip


@pytest.fixture
def run(monkeypatch, byte_checkpoint, tmp_path):
    """Return `run(*options)`: the record, with a CPU's products and attention for strict ones."""
    monkeypatch.setattr(
        strict_engine, "load_model", lambda name, **named: load_model(str(byte_checkpoint), **named)
    )
    pillar = pillarattn.PillarConfig
    monkeypatch.setattr(
        pillarattn, "PillarConfig", lambda strict, **named: pillar(min_budget=4, **named)
    )

    def ran(*options):
        out = tmp_path / "strict.jsonl"
        monkeypatch.setattr(sys, "argv", ["strict_engine", *SMALL, "--out", str(out), *options])
        try:
            strict_engine.main()
        finally:
            ran.record = json.loads(out.read_text().splitlines()[-1])
        return ran.record

    return ran


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_compares_drafts_with_none_and_a_batch_with_each_alone(run, temperature, monkeypatch):
    new, ways = strict_engine.new_engine, []
    monkeypatch.setattr(
        strict_engine, "new_engine",
        lambda given, model, batch, **named: ways.append((batch, *named.values()))
        or new(given, model, batch, **named),
    )  # fmt: skip
    record = run("--temperature", str(temperature))
    assert record["kind"] == strict_engine.KIND
    assert list(record["runs"]) == list(strict_engine.VARIANTS)
    assert ways == [
        (3, True, False), (3, True, True), (3, False, False), (3, False, True), (1, True, False),
    ]  # fmt: skip
    # Three requests of seven tokens after the first; those of a warm-up are not counted.
    assert record["runs"]["plain"]["tokens"] == 21
    for other, of in (("strict plain", 3), (strict_engine.ALONE, 2)):
        found = record[f"strict against {other}"]
        assert (found["rows"], found["of"], found["tokens_before"]) == (0, of, 8 * of)


def test_strict_tokens_that_differ_end_it_after_the_record(run, monkeypatch):
    ran = strict_engine.run_all

    def other(given, engine, texts, **named):
        tokens, found = ran(given, engine, texts, **named)
        if len(texts) == 1:
            tokens[0][5] = 1 if tokens[0][5] != 1 else 2
        return tokens, found

    monkeypatch.setattr(strict_engine, "run_all", other)
    with pytest.raises(SystemExit, match="strict tokens differ"):
        run()
    found = run.record[f"strict against {strict_engine.ALONE}"]
    assert found["rows"] == 2 and found["places"] == [5, 5]
    assert found["largest_gap"] > 0
