"""Records survive crashes: a half line is dropped, and the newest good record of a cell counts."""

from __future__ import annotations

import json

import pytest

from pillarattn.evaluation.results import append_record, latest, read_records, write_records


def record(name, status="ok", at="2026-01-01", **more):
    return {
        "schema": 1,
        "kind": "evaluation",
        "hash": name,
        "config": {},
        "status": status,
        "started_at": at,
        **more,
    }


def test_records_come_back_in_order(tmp_path):
    path = tmp_path / "deep" / "a.jsonl"
    for name in "abc":
        append_record(path, record(name, text="µ\n|"))
    assert [r["hash"] for r in read_records(path)] == ["a", "b", "c"]
    assert read_records(path)[0]["text"] == "µ\n|"
    assert path.read_bytes().count(b"\n") == 3


def test_a_half_line_is_not_read_and_is_cut_before_the_next(tmp_path):
    path = tmp_path / "a.jsonl"
    append_record(path, record("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"schema": 1, "kind": "eval' + b"x" * 200_000)
    assert [r["hash"] for r in read_records(path)] == ["a"]
    append_record(path, record("b"))
    assert path.read_bytes().startswith(whole)
    assert [r["hash"] for r in read_records(path)] == ["a", "b"]


def test_a_file_of_one_half_line_becomes_empty(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"schema"')
    assert read_records(path) == []
    append_record(path, record("a"))
    assert len(read_records(path)) == 1


def test_what_json_has_no_number_for_becomes_null(tmp_path):
    path = tmp_path / "a.jsonl"
    append_record(path, record("a", gap=float("inf"), list=[float("nan"), (1.0, -2)]))
    found = read_records(path)[0]
    assert found["gap"] is None
    assert found["list"] == [None, [1.0, -2]]
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense\n", "line 1: not JSON"),
        ("[1]\n", "line 1: not a JSON object"),
        ('{"a": 1}\n', "record 1: not a record of an evaluation"),
        (json.dumps(record("a") | {"schema": 99}) + "\n", "schema 99 is newer than 1"),
    ],
)
def test_what_is_no_record_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_records(path)


def test_the_newest_good_record_counts():
    records = [
        record("a", "failed", "2026-01-03"),
        record("b", at="2026-01-01", v=1),
        record("a", at="2026-01-01"),
        record("a", "failed", "2026-01-09"),
        record("b", at="2026-01-02", v=2),
        record("c", "failed", "2026-01-01"),
    ]
    found = latest(records)
    assert [(r["hash"], r["status"]) for r in found] == [("a", "ok"), ("b", "ok"), ("c", "failed")]
    assert found[1]["v"] == 2


def test_a_folder_is_its_merged_file_and_its_shards(tmp_path):
    write_records(tmp_path / "results.jsonl", [record("a", "failed"), record("b")])
    append_record(tmp_path / "shards" / "rank-000.jsonl", record("a"))
    append_record(tmp_path / "shards" / "rank-001.jsonl", record("c"))
    found = read_records(tmp_path)
    assert [(r["hash"], r["status"]) for r in found] == [("a", "ok"), ("b", "ok"), ("c", "ok")]


def test_nothing_there_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results at"):
        read_records(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds neither results\.jsonl"):
        read_records(tmp_path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.jsonl"
    write_records(path, [record("a")])
    before = path.read_bytes()

    def broken():
        yield record("b")
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        write_records(path, broken())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]
