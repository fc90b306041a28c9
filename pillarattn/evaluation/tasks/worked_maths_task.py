"""Problems that the library writes itself: an evaluation that needs no data and no network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from pillarattn.evaluation.tasks.base import Example, Score, Task, field_of, register_task
from pillarattn.evaluation.tasks.worked_maths import problems

MARK = "Answer:"


@register_task("worked_maths")
class WorkedMaths(Task):
    """Template mathematics, the same on every machine; see `worked_maths`."""

    instruction = f"Solve it step by step, and end with a line that starts with {MARK!r}."

    def generate_rows(self, count: int) -> Sequence[Mapping[str, Any]]:
        """Write `count` problems."""
        return [
            {"question": p.statement, "answer": p.answer, "solution": p.solution}
            for p in islice(problems(), count)
        ]

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """Read `question`, `answer` and `solution`."""
        question = str(field_of(row, ("question",), task=self.name, index=index))
        answer = str(field_of(row, ("answer",), task=self.name, index=index))
        return Example(str(index), question, answer, f"{row.get('solution', '')}\n{MARK} {answer}")

    def score(self, example: Example, completion: str, *, run_code: bool = False) -> Score:
        """Compare the numbers after the last `Answer:` with the reference, in any order."""
        _, mark, tail = completion.rpartition(MARK)
        if not mark or not tail.strip():
            return Score(False, None, f"no line starts with {MARK!r}")
        line = tail.strip().splitlines()[0]
        right = _numbers(line) == _numbers(example.answer)
        return Score(right, line, "" if right else f"expected {example.answer}")


def _numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"-?\d+(?:[./]\d+)?", text))
