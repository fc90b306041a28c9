"""Rows come from records and from probes alike; what is neither is named."""

from __future__ import annotations

import json

import pytest

from pillarattn.evaluation.probe_table import Table
from pillarattn.evaluation.report_rows import (
    GENERATION,
    PROBE,
    load_measurements,
    measurements,
    short_model,
)
from pillarattn.evaluation.results import append_record

ABOUT = {
    "model": "m",
    "dtype": "float32",
    "environment": {"device_name": "A CPU", "threads": 1, "versions": {"torch": "2"}},
}
PROBED = {
    "strategy": "quest", "k": 8, "s": 0.05, "temperature": 0.6, "mean_accepted": 3.5,
    "mean_overlap": 0.8, "accepted_by_position": [0.8] * 8,
    "by_length": [{"from": 1024, "to": 2048, "rounds": 3, "mean_accepted": 3.5}],
}  # fmt: skip


def test_a_record_becomes_a_row(make_record):
    found = measurements([make_record(drafter=["ngram", "sparse"], k=4, accepted=2.0)])
    (row,) = found.rows
    assert (row.source, row.strategy, row.k, row.s) == (GENERATION, "pillar", 4, 0.05)
    assert row.drafter == "ngram+sparse"
    assert row.name == "ngram+sparse (pillar)"
    assert row.keys_share == 0.05
    assert row.values["lossless"] is True
    assert found.environments == [
        "A CPU, 2 CPU threads, torch 2.13, transformers 5.24, commit 0123456789ab"
    ]


def test_theory_bounds_a_row(make_record):
    (row,) = measurements([make_record(accepted=6.0)]).rows
    # k = 8, rate .75: 7/9 if only weights cost, 7/1.4 if only the cache does.
    assert row.bounds == (pytest.approx(7 / 9), pytest.approx(7 / 1.4))
    (none,) = measurements([make_record(accepted=0.0)]).rows
    assert none.bounds == (pytest.approx(1 / 9), pytest.approx(1 / 1.4))


def test_settings_that_differ_are_part_of_the_name(make_record):
    options = ({"sink": 1, "recent": 4}, {"sink": 1, "recent": 8}, {"sink": 1})
    rows = measurements([make_record(options=given) for given in options]).rows
    assert [row.name for row in rows] == ["pillar, recent=4", "pillar, recent=8", "pillar"]
    rows = measurements([make_record(seed=1), make_record(n=9)]).rows
    assert [row.name for row in rows] == ["pillar", "pillar"]
    rows = measurements([make_record(context_tokens=9), make_record(k=4)]).rows
    assert [row.name for row in rows] == ["pillar, context_tokens=9", "pillar, context_tokens=0"]


def test_failed_cells_are_kept_apart(make_record):
    failed = {**make_record(), "status": "failed", "error": "boom"}
    found = measurements([failed])
    assert (found.rows, found.failed, found.environments) == ([], [failed], [])


@pytest.mark.parametrize("form", ["lines", "object"])
def test_a_probe_is_read_in_both_forms(tmp_path, make_record, form):
    path, other = tmp_path / "probe.jsonl", tmp_path / "cells.jsonl"
    if form == "lines":
        Table([PROBED], ABOUT).save(path)
    else:
        path.write_text(json.dumps(Table([PROBED], ABOUT).to_dict(), indent=2))
    append_record(other, make_record())
    found = load_measurements([path, other])
    row = next(row for row in found.rows if row.source == PROBE)
    assert (row.model, row.name, row.acceptance_length) == ("m", "quest", 4.5)
    assert row.acceptance_rate == 3.5 / 8
    assert row.values["mean_overlap"] == 0.8
    assert len(found.rows) == len(found.environments) == 2


def test_nothing_to_report_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results at"):
        load_measurements([tmp_path / "none"])
    empty = tmp_path / "a.jsonl"
    empty.write_text("")
    with pytest.raises(ValueError, match="nothing to report"):
        load_measurements([empty])
    empty.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="not a record of an evaluation"):
        load_measurements([empty])


def test_a_folder_is_shown_by_its_last_part(tmp_path):
    assert short_model(str(tmp_path / "my-model")) == "my-model"
    assert short_model("../models/a") == "a"
    assert short_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
