"""OlympiadBench: open-ended olympiad mathematics; answers are numbers, expressions, tuples."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log10
from typing import Any

from pillarattn.evaluation.tasks.aime24 import BOXED
from pillarattn.evaluation.tasks.base import Example, Score, Task, field_of, register_task
from pillarattn.evaluation.tasks.maths_answers import score_maths


@register_task("olympiadbench")
class OlympiadBench(Task):
    """The English, text-only, open-ended mathematics part (arXiv 2402.14008)."""

    source = "Hothan/OlympiadBench"
    subset = "OE_TO_maths_en_COMP"
    split = "train"
    instruction = BOXED

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """Read `question`, `context`, `solution` (a list) and `final_answer` (a list)."""
        question = str(field_of(row, ("question",), task=self.name, index=index))
        if row.get("context"):
            question = f"{row['context']}\n\n{question}"
        answers = field_of(row, ("final_answer",), task=self.name, index=index)
        solutions = row.get("solution") or []
        return Example(
            str(row.get("id", index)),
            question,
            ",".join([answers] if isinstance(answers, str) else map(str, answers)),
            "\n".join([solutions] if isinstance(solutions, str) else map(str, solutions)),
            {"error": row.get("error")},
        )

    def score(self, example: Example, completion: str, *, run_code: bool = False) -> Score:
        """Compare as mathematics; an `error` in the data says how many decimals count."""
        return score_maths(
            example.answer, completion, precision=_decimals(example.extra.get("error"))
        )


def _decimals(error: Any) -> int:
    """Return the decimals that an allowed error leaves: 0.1 -> 1, 1e-4 -> 4; none given -> 6."""
    try:
        allowed = float(error)
    except (TypeError, ValueError):
        return 6
    return max(0, ceil(-log10(allowed))) if allowed > 0 else 6
