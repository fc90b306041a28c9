"""The task contract: names, prompts, and rows that lack a field."""

from __future__ import annotations

import pytest

from pillarattn.errors import UnknownNameError
from pillarattn.evaluation.tasks import TASKS, Example, Score, Task, register_task
from pillarattn.evaluation.tasks.base import field_of


class Echo(Task):
    instruction = "Say it back."

    def example(self, row, index):
        return Example(str(index), row["text"], solution="done")

    def score(self, example, completion, *, run_code=False):
        return Score(completion == example.question)


def test_the_tasks_are_registered():
    names = {"aime24", "gsm8k", "livecodebench", "olympiadbench", "text", "worked_maths"}
    assert names <= set(TASKS.names())
    assert all(TASKS.get(name).name == name for name in names)
    with pytest.raises(UnknownNameError, match="unknown task 'maths'"):
        TASKS.get("maths")


def test_a_prompt_is_the_question_and_the_instruction():
    example = Echo().example({"text": "hello"}, 3)
    assert Echo().prompt(example) == "hello\n\nSay it back."
    assert Echo().worked(example) == "Problem: hello\nSolution: done\n\n"
    bare = type("Bare", (Echo,), {"instruction": ""})()
    assert bare.prompt(example) == "hello"


def test_only_tasks_can_be_registered():
    with pytest.raises(TypeError, match="must subclass Task"):
        register_task("thing")(dict)
    assert "thing" not in TASKS


def test_a_missing_field_is_named_with_those_that_are_there():
    assert field_of({"b": 0}, ("a", "b"), task="t", index=0) == 0
    with pytest.raises(ValueError, match=r"row 4 .* task 't' .* 'a', 'b'; its fields are 'c'"):
        field_of({"c": 1}, ("a", "b"), task="t", index=4)


def test_a_task_without_data_says_what_to_give():
    with pytest.raises(ValueError, match="give a JSONL path or a hub name"):
        Echo().generate_rows(1)
