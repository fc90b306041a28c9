"""A text is a prompt as it stands, and is not judged."""

from __future__ import annotations

from pillarattn.evaluation.tasks import TASKS

TASK = TASKS.get("text")()


def test_a_text_stays_as_it_is():
    example = TASK.example({"text": "Once upon"}, 0)
    assert TASK.prompt(example) == "Once upon"
    assert TASK.worked(example) == "Once upon\n\n"
    assert TASK.score(example, " a time").correct is None
