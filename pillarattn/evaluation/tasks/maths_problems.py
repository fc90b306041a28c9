"""Templates of mathematics problems with random numbers and worked solutions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import comb, gcd, isqrt


@dataclass(frozen=True)
class Problem:
    """One problem, its worked solution and its answer; `numbers` are the choices behind it."""

    kind: str
    statement: str
    solution: str
    answer: str
    numbers: dict[str, int] = field(default_factory=dict)


Template = Callable[[random.Random], Problem]


def linear_equation(rng: random.Random) -> Problem:
    """Solve ax + b = cx + d for a whole x."""
    x, c, more, b = rng.randint(2, 15), rng.randint(2, 6), rng.randint(2, 8), rng.randint(1, 30)
    a, d = c + more, more * x + b
    return Problem(
        "linear_equation",
        f"Solve the equation {a}x + {b} = {c}x + {d}.",
        f"Subtract {c}x from both sides: {more}x + {b} = {d}. Subtract {b} from both sides: "
        f"{more}x = {d - b}. Divide both sides by {more}: x = {d - b} / {more} = {x}. "
        f"Check: {a} * {x} + {b} = {a * x + b} and {c} * {x} + {d} = {c * x + d}, which agree.",
        f"x = {x}",
        {"a": a, "b": b, "c": c, "d": d, "x": x},
    )


def quadratic(rng: random.Random) -> Problem:
    """Solve a quadratic with two whole positive roots."""
    p, q = sorted(rng.sample(range(1, 13), 2))
    b, c = p + q, p * q
    disc = b * b - 4 * c
    return Problem(
        "quadratic",
        f"Find all real solutions of x^2 - {b}x + {c} = 0.",
        f"The discriminant is {b}^2 - 4 * {c} = {b * b} - {4 * c} = {disc}, and its square root is "
        f"{isqrt(disc)}. So x = ({b} + {isqrt(disc)}) / 2 = {q} or x = ({b} - {isqrt(disc)}) / 2 "
        f"= {p}. Check: {p} + {q} = {b} and {p} * {q} = {c}.",
        f"x = {p} or x = {q}",
        {"b": b, "c": c, "p": p, "q": q},
    )


def arithmetic_series(rng: random.Random) -> Problem:
    """Sum the first n terms of an arithmetic sequence."""
    a, d, n = rng.randint(1, 20), rng.randint(2, 9), rng.randint(8, 30)
    last, total = a + (n - 1) * d, n * (2 * a + (n - 1) * d) // 2
    return Problem(
        "arithmetic_series",
        f"An arithmetic sequence starts with {a} and has common difference {d}. "
        f"What is the sum of its first {n} terms?",
        f"The last term is {a} + ({n} - 1) * {d} = {a} + {(n - 1) * d} = {last}. The sum is the "
        f"number of terms times the mean of the first and the last: {n} * ({a} + {last}) / 2 = "
        f"{n} * {a + last} / 2 = {total}.",
        f"{total}",
        {"a": a, "d": d, "n": n, "total": total},
    )


def divisible_count(rng: random.Random) -> Problem:
    """Count the integers up to n that are divisible by a or b."""
    n = rng.randint(10, 60) * 10
    a, b = rng.choice([(2, 3), (3, 5), (4, 6), (6, 9), (4, 10), (5, 7), (6, 8)])
    both = a * b // gcd(a, b)
    total = n // a + n // b - n // both
    return Problem(
        "divisible_count",
        f"How many of the integers from 1 to {n} are divisible by {a} or by {b}?",
        f"There are {n // a} multiples of {a} and {n // b} multiples of {b}. Numbers divisible by "
        f"both are the multiples of {both}, of which there are {n // both}; they were counted "
        f"twice. So the count is {n // a} + {n // b} - {n // both} = {total}.",
        f"{total}",
        {"n": n, "a": a, "b": b, "total": total},
    )


def committee(rng: random.Random) -> Problem:
    """Count committees with fixed numbers of two kinds of people."""
    m, w, i, j = rng.randint(4, 9), rng.randint(4, 9), rng.randint(1, 3), rng.randint(1, 3)
    total = comb(m, i) * comb(w, j)
    return Problem(
        "committee",
        f"A club has {m} teachers and {w} students. In how many ways can it choose a committee of "
        f"{i} of the teachers and {j} of the students?",
        f"The teachers can be chosen in C({m}, {i}) = {comb(m, i)} ways and the students in "
        f"C({w}, {j}) = {comb(w, j)} ways. The two choices do not depend on each other, so they "
        f"multiply: {comb(m, i)} * {comb(w, j)} = {total}.",
        f"{total}",
        {"m": m, "w": w, "i": i, "j": j, "total": total},
    )


def right_triangle(rng: random.Random) -> Problem:
    """Find hypotenuse and area of a right triangle with whole sides."""
    u, v, scale = *sorted(rng.sample(range(1, 6), 2)), rng.randint(1, 4)
    a, b, c = scale * (v * v - u * u), scale * 2 * u * v, scale * (u * u + v * v)
    return Problem(
        "right_triangle",
        f"The legs of a right triangle are {a} and {b}. Find its hypotenuse and its area.",
        f"By the theorem of Pythagoras the square of the hypotenuse is {a}^2 + {b}^2 = {a * a} + "
        f"{b * b} = {c * c}, so the hypotenuse is {c}. The area is half the product of the legs: "
        f"{a} * {b} / 2 = {a * b // 2}.",
        f"hypotenuse {c}, area {a * b // 2}",
        {"a": a, "b": b, "c": c, "area": a * b // 2},
    )


def fraction_sum(rng: random.Random) -> Problem:
    """Add two fractions and simplify."""
    q, s = rng.sample(range(2, 13), 2)
    p = rng.choice([n for n in range(1, q) if gcd(n, q) == 1])
    r = rng.choice([n for n in range(1, s) if gcd(n, s) == 1])
    common = q * s // gcd(q, s)
    left, right = p * common // q, r * common // s
    total = Fraction(p, q) + Fraction(r, s)
    shared = gcd(left + right, common)
    reduce = f"Divide both by {shared}: {total}." if shared > 1 else "This is in lowest terms."
    return Problem(
        "fraction_sum",
        f"Calculate {p}/{q} + {r}/{s} in lowest terms.",
        f"The common denominator is {common}: {p}/{q} = {left}/{common} and {r}/{s} = "
        f"{right}/{common}. Their sum is {left + right}/{common}. {reduce}",
        f"{total}",
        {"p": p, "q": q, "r": r, "s": s},
    )


def prime_factors(rng: random.Random) -> Problem:
    """Factor a number and count its divisors."""
    powers = {p: rng.randint(1, 2 if p > 3 else 4) for p in sorted(rng.sample([2, 3, 5, 7, 11], 3))}
    n, divisors = 1, 1
    for prime, power in powers.items():
        n, divisors = n * prime**power, divisors * (power + 1)
    steps, rest = [], n
    for prime, power in powers.items():
        rest //= prime**power
        steps.append(f"{prime}^{power} leaves {rest}")
    product = " * ".join(f"{prime}^{power}" for prime, power in powers.items())
    options = " * ".join(f"({power} + 1)" for power in powers.values())
    return Problem(
        "prime_factors",
        f"Write {n} as a product of primes. How many positive divisors does it have?",
        f"Divide out the primes in turn: {'; '.join(steps)}. So {n} = {product}. A divisor takes "
        f"each prime from 0 times up to its power, so there are {options} = {divisors} divisors.",
        f"{n} = {product}, {divisors} divisors",
        {"n": n, "divisors": divisors},
    )


def power_remainder(rng: random.Random) -> Problem:
    """Find the remainder of a power by the period of its remainders."""
    base, modulus = rng.choice([(2, 7), (3, 7), (3, 10), (7, 10), (2, 9), (5, 13), (4, 9), (2, 11)])
    exponent = rng.randint(40, 300)
    cycle = [base % modulus]
    while cycle[-1] != 1:
        cycle.append(cycle[-1] * base % modulus)
    period, place = len(cycle), exponent % len(cycle)
    result = pow(base, exponent, modulus)
    found = f"{base}^{place}, which leaves {result}" if place else "1"
    return Problem(
        "power_remainder",
        f"What is the remainder when {base}^{exponent} is divided by {modulus}?",
        f"The powers of {base} leave the remainders {', '.join(map(str, cycle))} modulo {modulus}, "
        f"and then they repeat with period {period}. Since {exponent} = {period} * "
        f"{exponent // period} + {place}, the remainder is that of {found}.",
        f"{result}",
        {"base": base, "exponent": exponent, "modulus": modulus, "result": result},
    )


def two_unknowns(rng: random.Random) -> Problem:
    """Solve for two numbers given by their sum and a weighted sum."""
    x, y, a = rng.randint(2, 20), rng.randint(2, 20), rng.randint(2, 5)
    b = a + rng.randint(2, 5)
    total, cost = x + y, a * x + b * y
    return Problem(
        "two_unknowns",
        f"Pens cost {a} coins and books cost {b} coins. Someone buys {total} things for {cost} "
        f"coins. How many pens and how many books are there?",
        f"Let x be the pens and y the books: x + y = {total} and {a}x + {b}y = {cost}. Multiply "
        f"the first by {a}: {a}x + {a}y = {a * total}. Subtract it from the second: {b - a}y = "
        f"{cost - a * total}, so y = {y}. Then x = {total} - {y} = {x}.",
        f"{x} pens and {y} books",
        {"x": x, "y": y, "a": a, "b": b, "total": total, "cost": cost},
    )


TEMPLATES: tuple[Template, ...] = (
    linear_equation,
    quadratic,
    arithmetic_series,
    divisible_count,
    committee,
    right_triangle,
    fraction_sum,
    prime_factors,
    power_remainder,
    two_unknowns,
)
