"""The text of a probe: ids from whatever the caller has, and problem sets as one long text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATEMENT_FIELDS = ("question", "problem")


def token_ids(
    text_or_ids: str | Tensor | Sequence[int],
    tokenizer: Any = None,
    *,
    max_tokens: int | None = None,
) -> Tensor:
    """Return one text as ids, `[T]` int64, cut to its first `max_tokens`.

    Raises:
        ValueError: a text without a tokenizer, more than one row, or `max_tokens` below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if isinstance(text_or_ids, str):
        if tokenizer is None:
            raise ValueError("a text needs tokenizer=; or pass its token ids")
        text_or_ids = tokenizer(text_or_ids)["input_ids"]
    ids = torch.as_tensor(text_or_ids)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.is_floating_point():
        raise ValueError(
            f"a probe reads one text, ids [T] or [1, T]; got {ids.dtype} {list(ids.shape)}"
        )
    return ids.long()[:max_tokens]


def problem_text(path: str | Path, limit: int | None = None) -> str:
    """Return a problem set as one text: `Problem: ...`, `Solution: ...`, and an empty line each.

    Args:
        path: JSON Lines with `question` or `problem`, and `solution`: a string, or a list of
            strings, which are joined by newlines.
        limit: problems to take; None is all.

    Raises:
        ValueError: a line has other fields.
    """
    blocks: list[str] = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(blocks) >= limit:
                break
            if line.strip():
                blocks.append(_block(json.loads(line), f"{path}, line {number}"))
    return "".join(blocks)


def _block(problem: Any, place: str) -> str:
    fields = problem if isinstance(problem, dict) else {}
    statement = next((fields[name] for name in STATEMENT_FIELDS if name in fields), None)
    solution = fields.get("solution")
    if not isinstance(statement, str) or not isinstance(solution, (str, list)):
        raise ValueError(
            f"{place}: a problem needs 'question' or 'problem', and 'solution'; "
            f"found {', '.join(map(repr, fields)) or type(problem).__name__}"
        )
    solved = solution if isinstance(solution, str) else "\n".join(solution)
    return f"Problem: {statement}\nSolution: {solved}\n\n"
