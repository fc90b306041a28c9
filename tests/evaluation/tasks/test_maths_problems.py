"""Every template states true arithmetic: answers are recomputed here by other means."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import combinations
from math import hypot

import pytest

from pillarattn.evaluation.tasks.maths_problems import TEMPLATES

SEEDS = range(40)


def linear_equation(n, answer):
    assert n["a"] * n["x"] + n["b"] == n["c"] * n["x"] + n["d"]
    assert answer == f"x = {n['x']}"


def quadratic(n, answer):
    roots = [x for x in range(-50, 51) if x * x - n["b"] * x + n["c"] == 0]
    assert answer == " or ".join(f"x = {x}" for x in roots)


def arithmetic_series(n, answer):
    assert int(answer) == sum(n["a"] + i * n["d"] for i in range(n["n"]))


def divisible_count(n, answer):
    assert int(answer) == sum(x % n["a"] == 0 or x % n["b"] == 0 for x in range(1, n["n"] + 1))


def committee(n, answer):
    teachers = sum(1 for _ in combinations(range(n["m"]), n["i"]))
    students = sum(1 for _ in combinations(range(n["w"]), n["j"]))
    assert int(answer) == teachers * students


def right_triangle(n, answer):
    assert hypot(n["a"], n["b"]) == pytest.approx(n["c"])
    assert answer == f"hypotenuse {n['c']}, area {n['a'] * n['b'] // 2}"
    assert n["a"] * n["b"] % 2 == 0


def fraction_sum(n, answer):
    assert Fraction(answer) == Fraction(n["p"], n["q"]) + Fraction(n["r"], n["s"])
    assert str(Fraction(answer)) == answer


def prime_factors(n, answer):
    divisors = sum(n["n"] % x == 0 for x in range(1, n["n"] + 1))
    number, product, count = re.fullmatch(r"(\d+) = (.*), (\d+) divisors", answer).groups()
    value = 1
    for factor in product.split(" * "):
        prime, power = map(int, factor.split("^"))
        assert all(prime % x for x in range(2, prime))
        value *= prime**power
    assert int(number) == value == n["n"]
    assert int(count) == divisors


def power_remainder(n, answer):
    assert int(answer) == n["base"] ** n["exponent"] % n["modulus"]


def two_unknowns(n, answer):
    pens, books = map(int, re.fullmatch(r"(\d+) pens and (\d+) books", answer).groups())
    assert pens + books == n["total"]
    assert n["a"] * pens + n["b"] * books == n["cost"]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.__name__)
def test_the_answer_is_right(template):
    check = globals()[template.__name__]
    for seed in SEEDS:
        problem = template(random.Random(seed))
        assert problem.kind == template.__name__
        check(problem.numbers, problem.answer)


def equations(text):
    """Yield the sides of each equation between numbers; sides with letters are left out."""
    for run in re.finditer(r"[\d+*/()^= -]+", text):
        sides = run.group().split("=")
        if text[run.end() : run.end() + 1].isalpha() and not run.group().endswith(" "):
            sides = sides[:-1]
        whole = [
            side.strip() for side in sides if re.fullmatch(r" *[\d(][^a-z]*[\d)] *|\s*\d+\s*", side)
        ]
        whole = [side for side in whole if side.count("(") == side.count(")")]
        if len(whole) > 1:
            yield whole


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.__name__)
def test_every_equation_in_the_solution_holds(template):
    for seed in SEEDS:
        solution = template(random.Random(seed)).solution
        for sides in equations(solution):
            values = [eval(side.replace("^", "**")) for side in sides]
            assert values == pytest.approx([values[0]] * len(values)), (sides, solution)


def test_the_equations_are_found():
    text = "Then 3x = 27 / 3 = 9, x + 1 = 2 + 8 = 10 and 2^3 - (1 + 1) = 6; C(6, 3) = 20."
    assert list(equations(text)) == [["27 / 3", "9"], ["2 + 8", "10"], ["2^3 - (1 + 1)", "6"]]
    found = [sum(1 for _ in equations(t(random.Random(0)).solution)) for t in TEMPLATES]
    assert sum(found) >= 2 * len(TEMPLATES)


def test_there_are_enough_kinds():
    assert len({t.__name__ for t in TEMPLATES}) == len(TEMPLATES) >= 8
