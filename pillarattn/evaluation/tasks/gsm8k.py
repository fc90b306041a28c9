"""GSM8K: school mathematics in words, with one number as the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pillarattn.evaluation.tasks.aime24 import BOXED
from pillarattn.evaluation.tasks.base import Example, Score, Task, field_of, register_task
from pillarattn.evaluation.tasks.maths_answers import score_maths

MARK = "####"


@register_task("gsm8k")
class GSM8K(Task):
    """Grade School Math 8K (arXiv 2110.14168); its solutions end with `#### number`."""

    source = "openai/gsm8k"
    subset = "main"
    split = "test"
    instruction = BOXED

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """Read `question` and `answer`, whose part after `####` is the reference."""
        question = str(field_of(row, ("question",), task=self.name, index=index))
        text = str(field_of(row, ("answer",), task=self.name, index=index))
        solution, mark, answer = text.rpartition(MARK)
        if not mark:
            raise ValueError(f"row {index} of the data for task 'gsm8k' has no {MARK!r} in answer")
        return Example(
            str(row.get("id", index)),
            question,
            answer.strip().replace(",", ""),
            f"{solution.strip()}\nThe answer is $\\boxed{{{answer.strip()}}}$.",
        )

    def score(self, example: Example, completion: str, *, run_code: bool = False) -> Score:
        """Compare the boxed answer, or else the last number."""
        return score_maths(example.answer, completion)
