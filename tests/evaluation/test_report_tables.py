"""Tables say what was measured, in three forms, without empty columns."""

from __future__ import annotations

import csv
import io

from pillarattn.evaluation.report_rows import measurements
from pillarattn.evaluation.report_tables import ReportTable, report_tables


def tables(records):
    return {table.name: table for table in report_tables(measurements(records))}


def test_every_kind_of_table_is_there(make_record):
    records = [
        make_record(s, a, k=k) for s, a in (("pillar", 4.0), ("quest", 3.0)) for k in (8, 16)
    ]
    records.append({**make_record("vegas"), "status": "failed", "error": "boom | bang"})
    found = tables(records)
    assert list(found) == ["acceptance", "grid-1", "speed", "answers", "losslessness", "failed"]
    assert len(found["acceptance"].rows) == 4
    grid = found["grid-1"]
    assert list(grid.headings) == ["strategy", "k=8, s=0.05", "k=16, s=0.05"]
    assert grid.rows == [["pillar", 4.0, 4.0], ["quest", 3.0, 3.0]]
    assert found["failed"].rows == [("worked_maths vegas k=8 s=0.05 T=0", "boom | bang")]
    assert "boom \\| bang" in found["failed"].to_markdown()


def test_columns_that_are_empty_everywhere_are_left_out(make_record):
    found = tables([make_record()])
    assert "roofline" not in found["speed"].headings
    assert "overlap" not in found["acceptance"].headings
    assert "grid-1" not in found
    record = make_record()
    record["metrics"]["predicted_speedup"] = {"hardware": "H200", "speedup": 1.7}
    assert "roofline" in tables([record])["speed"].headings


def test_a_cell_that_was_measured_twice_is_averaged_and_a_missing_one_is_empty(make_record):
    records = [
        make_record("pillar", 4.0, seed=0),
        make_record("pillar", 2.0, seed=1),
        make_record("quest", 1.0, k=4),
    ]
    grid = tables(records)["grid-1"]
    assert list(grid.headings) == ["strategy", "k=4, s=0.05", "k=8, s=0.05"]
    assert grid.rows == [["pillar", None, 3.0], ["quest", 1.0, None]]


TABLE = ReportTable("t", "A <title>", ("name", "value"), [("a|b\nc", 1.23456), (None, 7)])


def test_markdown():
    assert TABLE.to_markdown() == (
        "### A <title>\n\n| name | value |\n| --- | --- |\n| a\\|b c | 1.235 |\n|  | 7 |\n"
    )


def test_csv_keeps_every_digit():
    assert list(csv.reader(io.StringIO(TABLE.to_csv()))) == [
        ["name", "value"],
        ["a|b\nc", "1.23456"],
        ["", "7"],
    ]


def test_html_is_escaped():
    text = TABLE.to_html()
    assert "<caption>A &lt;title&gt;</caption>" in text
    assert "<td>1.235</td>" in text


def test_settings_are_shown_as_they_were_given(make_record):
    found = tables([make_record(s=0.025, temperature=0.65)])["acceptance"]
    row = dict(zip(found.headings, found.rows[0], strict=True))
    assert (row["s"], row["T"], row["keys read"]) == ("0.025", "0.65", "5.0%")
