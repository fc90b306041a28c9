"""A long text of worked mathematics, written from templates, that a model can continue."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

from pillarattn.evaluation.tasks.maths_problems import TEMPLATES, Problem


def worked_maths(tokens_target: int, tokenizer: Any, seed: int = 0) -> str:
    """Return problems with worked solutions, ending with a new problem and `Solution:`.

    Args:
        tokens_target: length to stay within, in tokens of `tokenizer`; one unsolved problem is
            always there, however small the target.
        tokenizer: anything that returns `input_ids` when called with a text.
        seed: the same seed, target and tokenizer give the same text.

    Raises:
        ValueError: `tokens_target` is below 1.
    """
    if tokens_target < 1:
        raise ValueError(f"tokens_target must be at least 1 token, got {tokens_target!r}")
    solved: list[str] = []
    room = tokens_target
    for number, problem in enumerate(problems(seed), start=1):
        block = _statement(number, problem) + f" {problem.solution}\nAnswer: {problem.answer}\n\n"
        room -= _tokens(block, tokenizer)
        if room < 0:
            break
        solved.append(block)
    # Whole blocks are counted one by one; joined, a tokenizer may need a few tokens more.
    while True:
        text = "".join(solved) + _statement(len(solved) + 1, _problem(seed, len(solved)))
        if not solved or _tokens(text, tokenizer) <= tokens_target:
            return text
        solved.pop()


def problems(seed: int = 0) -> Iterator[Problem]:
    """Yield problems without end; every template comes once in each run of `len(TEMPLATES)`."""
    return (_problem(seed, index) for index in count())


def _problem(seed: int, index: int) -> Problem:
    # Each problem has its own generator, so that it does not depend on how many came before.
    cycle, place = divmod(index, len(TEMPLATES))
    order = list(TEMPLATES)
    random.Random(f"{seed}-order-{cycle}").shuffle(order)
    return order[place](random.Random(f"{seed}-problem-{index}"))


def _statement(number: int, problem: Problem) -> str:
    return f"Problem {number}. {problem.statement}\nSolution:"


def _tokens(text: str, tokenizer: Any) -> int:
    return len(tokenizer(text)["input_ids"])
