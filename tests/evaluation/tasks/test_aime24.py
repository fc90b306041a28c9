"""AIME rows in either spelling; integers are compared by value."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.tasks import TASKS

TASK = TASKS.get("aime24")()


@pytest.mark.parametrize(
    "row",
    [
        {"id": 60, "problem": "How many?", "answer": "073", "solution": "Count."},
        {"ID": "x", "Problem": "How many?", "Answer": 73, "Solution": "Count."},
    ],
)
def test_a_row_becomes_a_problem(row):
    example = TASK.example(row, 7)
    assert (example.question, example.solution) == ("How many?", "Count.")
    assert example.id == str(row.get("id", 7))
    assert r"\boxed{}" in TASK.prompt(example)


def test_an_answer_is_judged():
    pytest.importorskip("math_verify")
    example = TASK.example({"problem": "p", "answer": "073"}, 0)
    assert TASK.score(example, r"\boxed{73}").correct is True
    assert TASK.score(example, r"\boxed{37}").correct is False
