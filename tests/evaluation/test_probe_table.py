"""A probe's table: plain values, a data frame, a file that reads back."""

from __future__ import annotations

import json

import pytest
import torch

from pillarattn.evaluation.probe_table import Table, Tally


@pytest.fixture
def table():
    tally = Tally()
    tally.add([40, 100], torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.eye(2), keys=8.0)
    tally.add([300], torch.tensor([[0.2, 1.0]]), torch.ones(1, 2), keys=20.0)
    head = {"strategy": "pillar", "k": 2, "s": 0.05, "temperature": 0.6}
    return Table([head | tally.summary(per_round=True)], {"model": "tiny"})


def test_means_over_rounds(table):
    record = table[0]
    assert record["accepted_per_round"] == pytest.approx([0.75, 1.0, 0.4])
    assert record["mean_accepted"] == pytest.approx(2.15 / 3)
    assert record["mean_overlap"] == pytest.approx(3.2 / 6)
    assert record["overlap_by_position"] == pytest.approx([1.7 / 3, 0.5])
    assert record["accepted_by_position"] == pytest.approx([1.7 / 3, 0.45 / 3])
    assert record["greedy_agreement"] == pytest.approx(4 / 6)
    assert record["greedy_mean_accepted"] == pytest.approx(1.0)
    assert record["keys_read_per_draft_step"] == pytest.approx(12)
    assert [(b["from"], b["rounds"]) for b in record["by_length"]] == [(32, 1), (64, 1), (256, 1)]


def test_a_table_is_a_sequence_of_records_that_prints(table):
    assert len(table) == 1 and list(table) == table.records
    lines = repr(table).splitlines()
    assert lines[0].split()[:3] == ["strategy", "k", "s"]
    assert lines[1].split() == ["pillar", "2", "0.050", "0.717", "0.533", "0.667"]


def test_plain_values_and_a_data_frame(table):
    pandas = pytest.importorskip("pandas")
    plain = json.loads(json.dumps(table.to_dict()))
    assert plain["schema"] == 1 and plain["about"] == {"model": "tiny"}
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.loc[0, "strategy"] == "pillar"


def test_what_is_saved_reads_back(table, tmp_path):
    path = table.save(tmp_path / "new" / "probe.jsonl")
    again = Table.load(path)
    assert again.records == table.records and again.about == table.about
    path.write_text('{"strategy": "pillar"}\n')
    with pytest.raises(ValueError, match="not a probe's record"):
        Table.load(path)


def test_one_round_has_no_spread():
    tally = Tally()
    tally.add([64], torch.ones(1, 3), torch.ones(1, 3), keys=1.0)
    summary = tally.summary(per_round=False)
    assert summary["standard_error"] == 0 and summary["mean_accepted"] == 3
    assert "round_starts" not in summary
