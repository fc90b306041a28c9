"""OlympiadBench rows: lists of solutions and answers, contexts, and allowed errors."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.tasks import TASKS
from pillarattn.evaluation.tasks.olympiadbench import _decimals

TASK = TASKS.get("olympiadbench")()
ROW = {
    "id": 1606,
    "context": None,
    "question": "Find x.",
    "solution": ["First.", "Second."],
    "final_answer": ["$\\frac{1}{2}$"],
    "error": None,
}


def test_a_row_becomes_a_problem():
    example = TASK.example(ROW, 0)
    assert example.solution == "First.\nSecond."
    assert TASK.worked(example) == "Problem: Find x.\nSolution: First.\nSecond.\n\n"
    with_context = TASK.example({**ROW, "context": "Let y = 2."}, 0)
    assert with_context.question == "Let y = 2.\n\nFind x."


def test_an_allowed_error_says_how_many_decimals_count():
    assert [_decimals(error) for error in (None, "1e-1", 0.01, "5e-4", "", 0)] == [6, 1, 2, 4, 6, 6]


def test_an_answer_is_judged():
    pytest.importorskip("math_verify")
    assert TASK.score(TASK.example(ROW, 0), r"\boxed{0.5}").correct is True
    row = {**ROW, "final_answer": ["3.14"], "error": "1e-1"}
    assert TASK.score(TASK.example(row, 0), r"\boxed{3.11}").correct is True
    assert TASK.score(TASK.example({**row, "error": None}, 0), r"\boxed{3.11}").correct is False
