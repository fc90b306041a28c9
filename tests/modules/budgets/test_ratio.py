"""The budget table of reference.md 1.2, and its laws."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.modules.budgets import RatioBudget

TABLE = {
    100: 100,
    1000: 192,
    3840: 192,
    3841: 193,
    4096: 205,
    8192: 410,
    16384: 820,
    32768: 1639,
    122860: 6143,
}


@pytest.mark.parametrize(("length", "budget"), TABLE.items())
def test_the_table_of_the_reference(length, budget):
    assert RatioBudget(0.05, 192)(length) == budget


def test_it_rounds_up_where_the_streaming_variant_truncates():
    assert RatioBudget(0.05, 192)(8192) == 410
    assert int(0.05 * 8192) == 409


@given(
    length=st.integers(0, 200_000),
    hundredths=st.integers(1, 10_000),
    floor=st.integers(1, 5000),
)
def test_it_equals_the_rule_in_exact_arithmetic(length, hundredths, floor):
    exact = math.ceil(Fraction(hundredths, 10_000) * length)
    wanted = min(length, max(floor, exact))
    assert RatioBudget(hundredths / 10_000, floor)(length) == wanted


@given(s=st.floats(1e-9, 1.0), floor=st.integers(1, 300), length=st.integers(1, 5000))
def test_it_never_leaves_a_row_without_keys_and_never_falls_as_a_row_grows(s, floor, length):
    budget = RatioBudget(s, floor)
    assert 1 <= budget(length) <= length
    assert budget(length) <= budget(length + 1) <= budget(length) + 1


def test_all_keys_at_s_1_or_under_the_floor():
    assert all(RatioBudget(1.0, 1)(n) == n for n in range(300))
    assert all(RatioBudget(0.01, 128)(n) == n for n in range(129))


@pytest.mark.parametrize("s", [0.01, 0.02, 0.05, 0.07, 0.1, 0.3333, 0.5, 1.0])
@pytest.mark.parametrize("floor", [1, 128])
def test_the_device_computes_the_same(s, floor):
    budget, lengths = RatioBudget(s, floor), torch.arange(70_000)
    assert budget.of(lengths).tolist() == [budget(n) for n in range(70_000)]
