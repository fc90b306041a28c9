"""Code is taken out of the answer, and runs only where that was allowed."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest

from pillarattn.evaluation.tasks import TASKS
from pillarattn.evaluation.tasks.livecodebench import NOT_RUN, decode_cases, extract_code

TASK = TASKS.get("livecodebench")()
CASES = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}]
ROW = {
    "question_id": "abc_1",
    "question_content": "Double a number.",
    "starter_code": "",
    "public_test_cases": json.dumps(CASES),
    "private_test_cases": None,
    "metadata": "{}",
}
RIGHT = "Like this:\n```python\nprint(2 * int(input()))\n```\nDone."


def packed(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def test_a_row_becomes_a_problem():
    example = TASK.example({**ROW, "private_test_cases": packed(CASES)}, 0)
    assert example.id == "abc_1"
    assert example.extra == {"cases": [{"input": "3\n", "output": "6\n"}] * 2, "function": None}
    assert "standard input" in example.question


def test_a_function_problem_shows_its_starter_code():
    row = {**ROW, "starter_code": "class Solution:", "metadata": {"func_name": "double"}}
    example = TASK.example(row, 0)
    assert "```python\nclass Solution:\n```" in example.question
    assert "standard input" not in example.question
    assert example.extra["function"] == "double"


def test_code_does_not_run_unless_it_may(monkeypatch):
    from pillarattn.evaluation.tasks import livecodebench

    def forbidden(*_, **__):
        raise AssertionError("code was run")

    monkeypatch.setattr(livecodebench, "run_cases", forbidden)
    score = TASK.score(TASK.example(ROW, 0), RIGHT)
    assert (score.correct, score.reason) == (None, NOT_RUN)
    assert score.extracted == "print(2 * int(input()))\n"


def test_code_is_judged_where_it_may_run():
    example = TASK.example(ROW, 0)
    assert TASK.score(example, RIGHT, run_code=True).correct is True
    wrong = TASK.score(example, "```\nprint(7)\n```", run_code=True)
    assert (wrong.correct, wrong.reason) == (False, "case 0: wrong output")
    assert TASK.score(example, "no code", run_code=True).reason == "no code block found"
    bare = TASK.example({**ROW, "public_test_cases": None}, 0)
    assert TASK.score(bare, RIGHT, run_code=True).correct is None


def test_the_last_block_counts():
    text = "```py\na = 1\n```\nbetter:\n```Python\nb = 2\n```"
    assert extract_code(text) == "b = 2\n"
    assert extract_code("```python\nunfinished") is None


class Harmful:
    def __reduce__(self):
        return print, ("ran",)


def test_packed_cases_run_nothing(capsys):
    bomb = base64.b64encode(zlib.compress(pickle.dumps(Harmful()))).decode()
    with pytest.raises(ValueError, match=r"refused to load builtins\.print"):
        decode_cases(bomb)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="neither JSON nor packed JSON"):
        decode_cases("!!")
