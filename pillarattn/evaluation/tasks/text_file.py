"""Continue a given text: no question, no score; for acceptance on a text of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pillarattn.evaluation.tasks.base import Example, Score, Task, field_of, register_task


@register_task("text")
class TextFile(Task):
    """Each row's `text` is a prompt as it stands; a `.txt` file is one row."""

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """Read `text` (or `prompt`)."""
        text = field_of(row, ("text", "prompt"), task=self.name, index=index)
        return Example(str(row.get("id", index)), str(text))

    def score(self, example: Example, completion: str, *, run_code: bool = False) -> Score:
        """Judge nothing."""
        return Score(None, None, "a text has no answer")

    def worked(self, example: Example) -> str:
        """Return the text."""
        return f"{example.question}\n\n"
