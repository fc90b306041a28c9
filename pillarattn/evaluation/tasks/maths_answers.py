"""Find a model's final answer in a text and compare it with a reference, by `math-verify`."""

from __future__ import annotations

import logging
import threading
from typing import Any

from pillarattn.evaluation.tasks.base import Score

INSTALL = "pip install 'pillarattn[eval]'"
# Long texts end with the answer; searching all of a 30,000-token text takes minutes.
TAIL_CHARACTERS = 4000
SECONDS = 5


def require_math_verify() -> Any:
    """Return the module `math_verify`.

    Raises:
        ModuleNotFoundError: it is not installed; the message is the install command.
    """
    try:
        import math_verify
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "scoring mathematical answers needs the package 'math-verify'; "
            f"install it with: {INSTALL}"
        ) from None
    # It logs a warning for each answer that sympy cannot compare; the score says it already.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def score_maths(answer: str, completion: str, *, precision: int = 6) -> Score:
    r"""Judge the last answer in a completion: `\boxed{...}` first, else the last expression.

    Args:
        answer: the reference, as LaTeX with or without dollar signs, or a plain number.
        completion: what the model wrote.
        precision: decimals that count in numeric comparisons.

    Raises:
        ModuleNotFoundError: `math-verify` is not installed.
    """
    module = require_math_verify()
    # Its time-outs are signals, which only the main thread may set.
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    reference = module.parse(
        answer if "$" in answer else f"${answer}$", parsing_timeout=seconds, raise_on_error=False
    )
    if not reference:
        return Score(None, None, f"the reference {answer!r} is no mathematics that can be read")
    found = module.parse(
        completion[-TAIL_CHARACTERS:],
        extraction_config=[
            module.LatexExtractionConfig(boxed_match_priority=0),
            module.ExprExtractionConfig(),
        ],
        parsing_timeout=seconds,
        raise_on_error=False,
    )
    if not found:
        return Score(False, None, "no answer found")
    # The last element is the text that was taken for the answer.
    extracted = str(found[-1])
    right = module.verify(
        reference, found, float_rounding=precision, timeout_seconds=seconds, raise_on_error=False
    )
    return Score(bool(right), extracted, "" if right else f"expected {answer}")
