"""The library's own problems: the same everywhere, judged by the numbers of the answer line."""

from __future__ import annotations

from pillarattn.evaluation.tasks import TASKS, load_rows

TASK = TASKS.get("worked_maths")()


def examples(count):
    rows = load_rows(TASK, None, count=count)
    return [TASK.example(row, i) for i, row in enumerate(rows)]


def test_rows_need_no_data():
    rows = load_rows(TASK, None, count=3, start=2)
    assert [row["question"] for row in rows] == [e.question for e in examples(5)[2:]]


def test_its_own_solutions_are_right():
    for example in examples(30):
        assert TASK.score(example, example.solution).correct is True


def test_order_does_not_matter_and_values_do():
    example = TASK.example({"question": "q", "answer": "x = 3 or x = 4"}, 0)
    assert TASK.score(example, "... \nAnswer: x = 4 or x = 3").correct is True
    assert TASK.score(example, "Answer: x = 3").correct is False
    assert TASK.score(example, "Answer: x = 3 or x = 3").correct is False


def test_only_the_last_answer_line_counts():
    example = TASK.example({"question": "q", "answer": "12"}, 0)
    assert TASK.score(example, "Answer: 12\nAnswer: 13").correct is False
    assert TASK.score(example, "Answer: 12\nThat took 3 steps.").correct is True
    score = TASK.score(example, "It is 12")
    assert (score.correct, score.extracted) == (False, None)
    assert TASK.score(example, "Answer:").correct is False
