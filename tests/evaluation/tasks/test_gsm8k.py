"""GSM8K keeps its reference after four hashes."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.tasks import TASKS

TASK = TASKS.get("gsm8k")()
ROW = {"question": "How many eggs?", "answer": "She has 2 * 600 = <<2*600=1200>>1200.\n#### 1,200"}


def test_the_reference_is_what_follows_the_mark():
    example = TASK.example(ROW, 5)
    assert (example.id, example.answer) == ("5", "1200")
    assert "####" not in example.solution
    assert example.solution.endswith("$\\boxed{1,200}$.")


def test_a_row_without_the_mark_is_refused():
    with pytest.raises(ValueError, match=r"row 2 .* has no '####'"):
        TASK.example({"question": "q", "answer": "12"}, 2)


def test_an_answer_is_judged():
    pytest.importorskip("math_verify")
    example = TASK.example(ROW, 0)
    assert TASK.score(example, "So she has 1200 eggs.").correct is True
    assert TASK.score(example, "So she has 1201 eggs.").correct is False
