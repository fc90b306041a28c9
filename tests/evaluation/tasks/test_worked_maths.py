"""The text keeps to its length, ends with an open problem, and depends on its seed alone."""

from __future__ import annotations

from itertools import islice

import pytest

from pillarattn.evaluation.tasks.maths_problems import TEMPLATES
from pillarattn.evaluation.tasks.worked_maths import problems, worked_maths


def words(text):
    return {"input_ids": text.split()}


def test_it_stays_within_the_target_and_comes_near_it():
    for target in (200, 1000, 3000):
        size = len(words(worked_maths(target, words))["input_ids"])
        assert target - 120 <= size <= target


def test_it_ends_with_an_open_problem():
    text = worked_maths(500, words)
    assert text.endswith("\nSolution:")
    assert text.count("Problem ") == text.count("Answer: ") + 1
    assert text.startswith("Problem 1. ")


def test_the_smallest_text_is_one_problem():
    assert worked_maths(1, words).count("Problem") == 1


def test_a_seed_fixes_the_text():
    assert worked_maths(500, words) == worked_maths(500, words)
    assert worked_maths(500, words) != worked_maths(500, words, seed=1)


def test_a_longer_text_begins_with_the_shorter_one():
    short = worked_maths(300, words)
    assert worked_maths(900, words).startswith(short[: -len("Solution:")])


def test_every_kind_comes_once_a_cycle():
    kinds = [p.kind for p in islice(problems(seed=2), len(TEMPLATES))]
    assert sorted(kinds) == sorted(t.__name__ for t in TEMPLATES)


def test_a_target_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        worked_maths(0, words)
