"""Rows come from local files line by line, or through `datasets`; mistakes are named."""

from __future__ import annotations

import json
import sys
import types

import pytest

from pillarattn.evaluation.tasks import TASKS, load_rows

AIME = TASKS.get("aime24")()
CODE = TASKS.get("livecodebench")()


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "aime24.jsonl"
    lines = [json.dumps({"problem": f"p{i}", "answer": str(i)}) for i in range(5)]
    path.write_text("\n\n".join(lines) + "\n")
    return path


def test_a_range_of_rows_is_read(problems):
    rows = load_rows(AIME, str(problems), count=2, start=1)
    assert [row["problem"] for row in rows] == ["p1", "p2"]
    assert len(load_rows(AIME, str(problems), count=99)) == 5


def test_a_folder_is_searched_for_the_tasks_file(problems):
    assert len(load_rows(AIME, str(problems.parent), count=3)) == 3


def test_a_text_file_is_one_row(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text")
    assert load_rows(TASKS.get("text")(), str(path), count=4) == [{"text": "some text"}]


def test_mistakes_are_named(problems, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl' does not exist"):
        load_rows(AIME, str(tmp_path / "none.jsonl"), count=1)
    with pytest.raises(ValueError, match="has no row 9"):
        load_rows(AIME, str(problems), count=1, start=9)
    problems.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        load_rows(AIME, str(problems), count=2)
    problems.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"line 1: not a JSON object but '\[1\]"):
        load_rows(AIME, str(problems), count=2)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for `datasets` that notes its calls."""
    calls = []

    def load_dataset(*names, **options):
        calls.append((names, options))
        return iter([{"id": i} for i in range(10)])

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_the_tasks_own_data_comes_from_the_hub(hub):
    rows = load_rows(TASKS.get("gsm8k")(), None, count=2, start=3)
    assert rows == [{"id": 3}, {"id": 4}]
    assert hub == [(("openai/gsm8k", "main"), {"split": "test", "streaming": True})]


def test_another_hub_name_brings_its_own_subset_and_split(hub):
    load_rows(AIME, "someone/aime", count=1, split="validation")
    assert hub == [(("someone/aime", None), {"split": "validation", "streaming": True})]


def test_files_in_a_repository_are_read_as_json(hub):
    load_rows(CODE, None, count=1)
    ((names, options),) = hub
    assert names == ("json",)
    assert options["data_files"] == ["hf://datasets/livecodebench/code_generation_lite/test.jsonl"]


def test_a_failed_download_says_what_to_do(hub, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", fail)
    with pytest.raises(ValueError, match=r"could not load 'openai/gsm8k'.*local JSONL file"):
        load_rows(TASKS.get("gsm8k")(), None, count=1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pillarattn\[eval\]'"):
        load_rows(AIME, None, count=1)
