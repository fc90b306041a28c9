"""The corrected formula: published figures, limits, and what the quoted form gets wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.theory.speedup import (
    attention_bound,
    best_k_by_cost,
    best_k_by_share,
    compute_bound,
    seconds_per_token,
    speedup_by_share,
    weight_bound,
)

share = st.floats(0, 1)
positive_share = st.floats(0.001, 1)
drafts = st.integers(0, 20)


@pytest.mark.parametrize(("rate", "bound"), [(0.77, 5.114), (0.742, 4.954), (0.578, 4.017)])
def test_the_attention_bound_of_the_paper(rate, bound):
    assert attention_bound(8, rate, 0.05) == pytest.approx(bound, abs=6e-4)


@pytest.mark.parametrize(
    ("rate", "speedups"),
    [
        (0.77, (2.274, 1.946, 1.377, 1.065)),
        (0.742, (2.203, 1.885, 1.334, 1.032)),
        (0.578, (1.787, 1.528, 1.082, 0.837)),
    ],
)
def test_speedups_by_attention_share(rate, speedups):
    found = [speedup_by_share(8, rate, 0.05, f) for f in (0.77, 0.7, 0.5, 0.3)]
    assert found == pytest.approx(speedups, abs=6e-4)


def test_the_papers_quoted_gain_belongs_to_a_share_of_58_percent():
    found = [speedup_by_share(8, rate, 0.05, 0.582) for rate in (0.75, 0.95)]
    assert found == pytest.approx([1.53, 1.88], abs=5e-3)
    found = [speedup_by_share(8, rate, 0.05, 0.77) for rate in (0.75, 0.95)]
    assert found == pytest.approx([2.22, 2.73], abs=5e-3)


@pytest.mark.parametrize(
    ("alpha", "k", "speedup"),
    [(0.90, 5, 2.00), (0.93, 7, 2.18), (0.95, 8, 2.35), (0.96, 10, 2.45), (0.97, 12, 2.58)],
)
def test_the_best_k_by_share(alpha, k, speedup):
    found = best_k_by_share(alpha, 0.05, 0.77)
    assert found[0] == k
    assert found[1] == pytest.approx(speedup, abs=6e-3)


@pytest.mark.parametrize(("chance", "k"), [(0.93, 10), (0.95, 12), (0.8, 5)])
def test_the_best_k_by_cost(chance, k):
    assert best_k_by_cost([chance] * 30, draft_cost=0.15, verify_cost=1) == k


def test_drafts_that_never_pay_are_not_made():
    assert best_k_by_share(0.5, 1.0, 0.0) == (0, 1.0)
    assert best_k_by_cost([0.5] * 8, draft_cost=1.0, verify_cost=1.0) == 0
    assert best_k_by_cost([1.0] * 8, draft_cost=0.1, verify_cost=1.0) == 8


def test_limits_of_other_resources():
    assert weight_bound(8, 0.77) == pytest.approx(0.80, abs=5e-3)
    assert compute_bound(8, 0.77) == pytest.approx(0.42, abs=5e-3)


@given(share, positive_share, share)
def test_no_drafts_is_plain_decoding(rate, s, f):
    assert speedup_by_share(0, rate, s, f) == 1
    assert attention_bound(0, rate, s) == weight_bound(0, rate) == compute_bound(0, rate) == 1


@given(drafts, share)
def test_reading_everything_and_accepting_everything_gains_nothing(k, f):
    assert speedup_by_share(k, 1.0, 1.0, f) == pytest.approx(1)


@given(drafts, share, share, positive_share, positive_share, share)
def test_it_grows_with_acceptance_and_shrinks_with_s(k, a, b, s, t, f):
    low, high = sorted((a, b))
    small, large = sorted((s, t))
    assert speedup_by_share(k, low, s, f) <= speedup_by_share(k, high, s, f) + 1e-12
    assert speedup_by_share(k, a, large, f) <= speedup_by_share(k, a, small, f) + 1e-12
    # Between the bounds of its two parts.
    bounds = sorted((weight_bound(k, a), attention_bound(k, a, s)))
    assert bounds[0] - 1e-12 <= speedup_by_share(k, a, s, f) <= bounds[1] + 1e-12


@given(st.integers(1, 20), share, positive_share, share)
def test_waiting_for_the_verdict_costs_one_fixed_step(k, rate, s, f):
    waiting = speedup_by_share(k, rate, s, f, idle_steps=1)
    assert waiting <= speedup_by_share(k, rate, s, f)
    assert speedup_by_share(k, rate, s, 1.0, idle_steps=1) == speedup_by_share(k, rate, s, 1.0)


@given(st.integers(1, 20), share, positive_share, st.floats(0.01, 0.99))
def test_the_formula_with_costs_agrees_with_shares(k, rate, s, f):
    """Fixed GEMM time 1 - f, attention time f in proportion to what is read."""
    spent = seconds_per_token(
        *(k, rate, s),
        batch=16,
        cached_tokens=1e6,
        gemm_seconds=lambda rows: 1 - f,
        attention_seconds=lambda tokens: f * tokens / 1e6,
    )
    assert 1 / spent == pytest.approx(speedup_by_share(k, rate, s, f))


def test_the_formula_asks_for_the_unified_rows_and_misses_no_factor():
    asked = []

    def gemm(rows):
        asked.append(rows)
        return 0.0

    k, rate, s = 8, 0.77, 0.05
    spent = seconds_per_token(
        *(k, rate, s),
        batch=128,
        cached_tokens=1e6,
        gemm_seconds=gemm,
        attention_seconds=lambda tokens: tokens,
    )
    assert asked == [pytest.approx(241.8, abs=0.05)]
    # 1.4 / 7.16 = .196: "about 80 % saved". The quoted form would say 98 %.
    assert spent / 1e6 == pytest.approx(0.196, abs=5e-4)
    quoted = (k * s + 1) / (k + 1) * 1e6 / (k * rate + 1)
    assert spent == pytest.approx((k + 1) * quoted)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="attention_share"):
        speedup_by_share(8, 0.7, 0.05, 1.2)
    with pytest.raises(ValueError, match="costs must be positive"):
        best_k_by_cost([0.9], 0.0, 1.0)
