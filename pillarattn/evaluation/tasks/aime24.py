"""AIME 2024: thirty competition problems whose answers are integers from 0 to 999."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pillarattn.evaluation.tasks.base import Example, Score, Task, field_of, register_task
from pillarattn.evaluation.tasks.maths_answers import score_maths

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."


@register_task("aime24")
class AIME24(Task):
    """The American Invitational Mathematics Examination of 2024, papers I and II."""

    source = "HuggingFaceH4/aime_2024"
    split = "train"
    instruction = BOXED

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """Read `problem`, `answer` and `solution` (or capitalised, as some copies have it)."""
        question = field_of(row, ("problem", "question", "Problem"), task=self.name, index=index)
        answer = field_of(row, ("answer", "Answer"), task=self.name, index=index)
        solution = row.get("solution") or row.get("Solution") or ""
        return Example(str(row.get("id", index)), str(question), str(answer), str(solution))

    def score(self, example: Example, completion: str, *, run_code: bool = False) -> Score:
        """Compare the boxed answer, or else the last number."""
        return score_maths(example.answer, completion)
