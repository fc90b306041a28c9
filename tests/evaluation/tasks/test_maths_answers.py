"""Answers are found and compared as mathematics, not as text."""

from __future__ import annotations

import sys
import threading

import pytest

from pillarattn.evaluation.tasks.maths_answers import score_maths

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("204", r"so it takes \boxed{204} minutes"),
        ("033", r"\boxed{33}"),
        (r"\frac{1}{2}", r"the ratio is $\boxed{0.5}$"),
        (r"$\frac{1}{2}$", r"\boxed{\frac12}"),
        ("12", "The answer is 12."),
        ("4.25", r"\boxed{\frac{17}{4}}"),
        (r"$(3,2),(-3,2)$", r"\boxed{(3,2), (-3,2)}"),
        ("1000", r"It is $\boxed{1,000}$."),
    ],
)
def test_equal_values_are_right(answer, completion):
    score = score_maths(answer, completion)
    assert score.correct is True
    assert score.reason == ""


@pytest.mark.parametrize(
    ("answer", "completion"),
    [("204", r"\boxed{205}"), ("12", "I found 12 but the answer is 13."), ("7", r"\boxed{7x}")],
)
def test_other_values_are_wrong(answer, completion):
    score = score_maths(answer, completion)
    assert score.correct is False
    assert score.reason == f"expected {answer}"
    assert score.extracted


def test_the_box_counts_before_what_follows_it():
    assert score_maths("5", r"So \boxed{5}, as 2 + 3 = 5 and not 6 or 7.").correct is True


def test_no_answer_is_said_so():
    score = score_maths("5", "I do not know")
    assert (score.correct, score.extracted, score.reason) == (False, None, "no answer found")


def test_an_unreadable_reference_is_not_the_models_fault():
    score = score_maths("$ $", r"\boxed{5}")
    assert score.correct is None
    assert "no mathematics" in score.reason


def test_precision_is_that_of_the_data():
    assert score_maths("3.14159", r"\boxed{3.14161}", precision=4).correct is True
    assert score_maths("3.14159", r"\boxed{3.14161}", precision=5).correct is False


def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(score_maths("5", r"\boxed{5}")))
    thread.start()
    thread.join()
    assert found[0].correct is True


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pillarattn\[eval\]'"):
        score_maths("5", r"\boxed{5}")
