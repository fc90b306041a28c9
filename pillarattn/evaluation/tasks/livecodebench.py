"""LiveCodeBench: programming problems with test cases; code runs only where the user allows it."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from typing import Any

from pillarattn.evaluation.tasks.base import Example, Score, Task, field_of, register_task
from pillarattn.evaluation.tasks.code_execution import run_cases

NOT_RUN = "not executed; --allow-code-execution runs the model's code"
_BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@register_task("livecodebench")
class LiveCodeBench(Task):
    """Code generation, release v1 by default (arXiv 2403.07974): standard input or a function."""

    source = "livecodebench/code_generation_lite"
    files = ("test.jsonl",)
    instruction = (
        "Write a correct Python program that solves the problem. "
        "Put the whole program into one ```python code block."
    )

    def example(self, row: Mapping[str, Any], index: int) -> Example:
        """Read `question_content`, `starter_code`, `metadata` and the test cases."""
        question = str(field_of(row, ("question_content",), task=self.name, index=index))
        starter = str(row.get("starter_code") or "")
        if starter:
            question += f"\n\nStart from this code:\n```python\n{starter}\n```"
        elif self._function(row) is None:
            question += "\n\nRead from standard input and write to standard output."
        cases = [
            *decode_cases(row.get("public_test_cases")),
            *decode_cases(row.get("private_test_cases")),
        ]
        return Example(
            str(row.get("question_id", index)),
            question,
            extra={"cases": cases, "function": self._function(row)},
        )

    def score(self, example: Example, completion: str, *, run_code: bool = False) -> Score:
        """Take the last code block and, if `run_code`, run it on every test case."""
        program = extract_code(completion)
        if program is None:
            return Score(False, None, "no code block found")
        if not run_code:
            return Score(None, program, NOT_RUN)
        cases = example.extra["cases"]
        if not cases:
            return Score(None, program, "the row has no test cases")
        result = run_cases(program, cases, function=example.extra["function"])
        return Score(result.passed, program, result.reason)

    @staticmethod
    def _function(row: Mapping[str, Any]) -> str | None:
        metadata = row.get("metadata") or {}
        if isinstance(metadata, str):
            metadata = json.loads(metadata)
        name = metadata.get("func_name")
        return str(name) if name else None


def extract_code(completion: str) -> str | None:
    """Return the last fenced code block of a text, or None."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1].rstrip() + "\n" if blocks else None


def decode_cases(stored: Any) -> list[dict[str, str]]:
    """Return test cases that are stored as a list, as JSON, or as packed JSON (private ones).

    Raises:
        ValueError: the text is none of these.
    """
    if not stored:
        return []
    if isinstance(stored, str):
        try:
            stored = json.loads(stored)
        except json.JSONDecodeError:
            stored = _unpack(stored)
    return [{"input": str(case["input"]), "output": str(case["output"])} for case in stored]


def _unpack(text: str) -> Any:
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        return json.loads(_TextOnlyUnpickler(io.BytesIO(packed)).load())
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"test cases are neither JSON nor packed JSON: {error}") from None


class _TextOnlyUnpickler(pickle.Unpickler):
    """Reads plain values; a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refused to load {module}.{name} from a data set")
