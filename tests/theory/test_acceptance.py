"""Acceptance: closed forms, published numbers, inverses, tables."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.theory.acceptance import (
    AcceptanceTable,
    acceptance_length,
    acceptance_rate,
    accepted_law,
    alpha_of,
    chances_from_counts,
    constant_acceptance,
    mean_accepted,
    mean_accepted_by_position,
    positional_acceptance,
    survival,
)

chance = st.floats(0, 1)
length = st.integers(0, 24)


@pytest.mark.parametrize(
    ("k", "alpha", "emitted"), [(3, 0.8, 2.952), (4, 0.8, 3.3616), (8, 0.9416, 7.160)]
)
def test_published_acceptance_lengths(k, alpha, emitted):
    assert acceptance_length(alpha, k) == pytest.approx(emitted, abs=1e-3)


@pytest.mark.parametrize(("accepted", "alpha"), [(6.16, 0.9416), (5.94, 0.933), (4.62, 0.876)])
def test_the_chance_behind_the_papers_mean_accepted(accepted, alpha):
    assert alpha_of(accepted, 8) == pytest.approx(alpha, abs=5e-4)


@given(st.floats(0, 0.999), length)
def test_the_sum_is_the_geometric_closed_form(alpha, k):
    closed = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert acceptance_length(alpha, k) == pytest.approx(closed, rel=1e-9)


@given(chance, chance, length)
def test_more_chance_and_more_drafts_accept_more(a, b, k):
    low, high = sorted((a, b))
    assert mean_accepted(low, k) <= mean_accepted(high, k) <= k
    assert mean_accepted(low, k) <= mean_accepted(low, k + 1)
    assert 0 <= acceptance_rate(low, k) <= 1


@given(chance)
def test_limits(alpha):
    assert mean_accepted(alpha, 0) == 0
    assert acceptance_rate(alpha, 0) == 0
    assert mean_accepted(alpha, 1) == alpha
    assert mean_accepted(1.0, 12) == 12
    assert mean_accepted(0.0, 12) == 0


@given(st.integers(1, 24), chance)
def test_the_inverse_gives_the_mean_back(k, share):
    assert mean_accepted(alpha_of(share * k, k), k) == pytest.approx(share * k, abs=1e-9)


@given(chance, length)
def test_equal_chances_by_position_are_the_closed_form(alpha, k):
    assert mean_accepted_by_position([alpha] * k) == pytest.approx(mean_accepted(alpha, k))


@given(st.lists(chance, max_size=12))
def test_the_law_of_accepted_drafts_sums_to_one_and_has_that_mean(chances):
    law = accepted_law(chances)
    assert len(law) == len(chances) + 1
    assert min(law) >= -1e-12
    assert math.fsum(law) == pytest.approx(1)
    mean = math.fsum(n * p for n, p in enumerate(law))
    assert mean == pytest.approx(mean_accepted_by_position(chances), abs=1e-9)


def test_counts_of_simulated_rounds_give_the_chances_back():
    chances, rng = [0.9, 0.5, 0.8], random.Random(0)
    rounds = 200_000
    accepted = [0, 0, 0]
    for _ in range(rounds):
        for j, p in enumerate(chances):
            if rng.random() >= p:
                break
            accepted[j] += 1
    found = chances_from_counts(accepted, [rounds] * 3)
    # Three standard deviations of the smallest sample.
    assert found == pytest.approx(chances, abs=3 * 0.5 / math.sqrt(rounds * 0.45))
    mean = sum(accepted) / rounds
    assert mean_accepted_by_position(found) == pytest.approx(mean)
    assert positional_acceptance(found)(3, 0.05) == pytest.approx(mean)


def test_counts_stop_where_nothing_was_accepted():
    assert chances_from_counts([5, 0, 0], [10, 10, 10]) == [0.5, 0.0, 0.0]
    assert chances_from_counts([0, 0], [0, 0]) == [0.0, 0.0]


def test_survival_is_the_running_product():
    assert survival([0.5, 0.5, 0.0, 1.0]) == [0.5, 0.25, 0.0, 0.0]


def test_constant_acceptance_ignores_s():
    assert constant_acceptance(0.8)(3, 0.05) == constant_acceptance(0.8)(3, 1.0)
    assert constant_acceptance(0.8)(3, 0.05) == pytest.approx(1.952)


def test_measured_positions_are_not_stretched():
    with pytest.raises(ValueError, match="measured up to k = 2, got k = 3"):
        positional_acceptance([0.9, 0.8])(3, 0.05)


@pytest.fixture
def table():
    return AcceptanceTable({(8, 0.05): 5.0, (8, 0.2): 6.0, (4, 0.05): 3.0})


def test_a_table_returns_what_was_measured(table):
    assert table(8, 0.05) == 5.0
    assert table(4, 0.05) == 3.0
    assert table(0, 0.07) == 0.0
    assert (table.ks, table.ss) == ([4, 8], [0.05, 0.2])


def test_a_table_interpolates_the_chance_in_log_s(table):
    middle = table(8, 0.1)  # halfway between 0.05 and 0.2 in log s
    alpha = (alpha_of(5.0, 8) + alpha_of(6.0, 8)) / 2
    assert middle == pytest.approx(mean_accepted(alpha, 8))
    assert 5.0 < middle < 6.0


def test_a_table_takes_the_nearest_k(table):
    assert table(5, 0.05) == pytest.approx(mean_accepted(alpha_of(3.0, 4), 5))
    assert table(7, 0.05) == pytest.approx(mean_accepted(alpha_of(5.0, 8), 7))


@pytest.mark.parametrize("s", [0.01, 0.5])
def test_a_table_does_not_leave_its_range(table, s):
    with pytest.raises(ValueError, match=r"measured for s from 0\.05 to 0\.2"):
        table(8, s)


def test_records_are_filtered_and_must_be_unique():
    records = [
        {"strategy": "pillar", "k": 8, "s": 0.05, "mean_accepted": 4.0},
        {"strategy": "uniform", "k": 8, "s": 0.05, "mean_accepted": 1.0},
    ]
    assert AcceptanceTable.from_records(records, strategy="pillar")(8, 0.05) == 4.0
    with pytest.raises(ValueError, match=r"two records for k = 8, s = 0\.05"):
        AcceptanceTable.from_records(records)
    with pytest.raises(ValueError, match="at least one"):
        AcceptanceTable.from_records(records, strategy="oracle")
    with pytest.raises(ValueError, match="needs mean_accepted"):
        AcceptanceTable.from_records([{"k": 8, "s": 0.05}])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_accepted(1.2, 3), "alpha must be within 0 and 1"),
        (lambda: mean_accepted(0.5, -1), "k must be an integer >= 0"),
        (lambda: mean_accepted(0.5, 2.5), "k must be an integer"),
        (lambda: alpha_of(9, 8), "within 0 and k = 8, got 9"),
        (lambda: alpha_of(0, 0), "k must be an integer >= 1"),
        (lambda: chances_from_counts([3], [2]), "got 3 of 2"),
        (lambda: chances_from_counts([3], []), "one length"),
        (lambda: survival([0.5, -0.1]), "got -0.1"),
        (lambda: AcceptanceTable({(8, 0.05): 9.0}), "within 0 and k = 8"),
        (lambda: AcceptanceTable({(8, 0.0): 2.0}), "0 < s <= 1"),
    ],
)
def test_a_value_out_of_range_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
