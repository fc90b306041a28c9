"""What the gate believes: times by length, by rows and keys, and acceptance by position."""

from __future__ import annotations

import random

import pytest

from pillarattn.decoding.cost_gate.length_curve import LengthCurve
from pillarattn.decoding.cost_gate.outlook import Outlook
from pillarattn.decoding.cost_gate.position_acceptance import PositionAcceptance, mean_tokens
from pillarattn.decoding.cost_gate.round_costs import RoundCosts


def test_a_line_is_found_through_noise_and_stalls():
    draw, curve = random.Random(0), LengthCurve()
    for length in range(1000, 4000, 10):
        stall = 20.0 if draw.random() < 0.1 else 1.0
        curve.add(length, (1.0 + length / 1000) * draw.lognormvariate(0, 0.03) * stall)
    assert curve.at(4000) == pytest.approx(5.0, rel=0.05)
    assert curve.at(8000) == pytest.approx(9.0, rel=0.15)


def test_a_level_is_a_median_and_falls_with_the_machine():
    curve = LengthCurve()
    curve.add(100, 50.0)
    assert curve.at(100) == 50.0
    curve.add(100, 1.0)
    # Of two, the smaller one: the first pass may have compiled.
    assert curve.at(100) == 1.0
    for _ in range(15):
        curve.add(100, 3.0)
    assert curve.at(100) == 3.0
    assert curve.at(1000) == 3.0
    assert curve.at(1000, slope=0.01) == pytest.approx(12.0)


def test_time_grows_with_the_context_no_faster_than_in_proportion():
    curve = LengthCurve()
    for length in (100, 100, 100, 120, 120, 120, 150, 150, 150):
        curve.add(length, length**3 / 1e6)
    assert curve.at(300) <= 2.01 * curve.at(150)
    for length in (200, 200, 200, 250, 250, 250, 320, 320, 320):
        curve.add(length, 1.0 / length)
    assert curve.at(1000) == pytest.approx(1.0 / 250, rel=0.3)


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="nothing was measured"):
        LengthCurve().at(10)


def test_rests_and_drafts_are_interpolated():
    costs = RoundCosts(min_budget=100)
    for _ in range(3):
        costs.add_plain(10000, 10.0)
        costs.add_round(4, 0.05, 10000, draft=4 * 2.0, rest=14.0)
        costs.add_round(8, 0.05, 10000, draft=8 * 2.0, rest=26.0)
    assert costs.rest_seconds(4, 10000) == 14.0
    assert costs.rest_seconds(6, 10000) == pytest.approx(20.0)
    assert costs.rest_seconds(2, 10000) == pytest.approx(12.0)
    assert costs.rest_seconds(12, 10000) == pytest.approx(38.0)
    assert costs.draft_seconds(0.05, 10000) == 2.0
    # Between 500 keys and all of them, on the line from a draft step to a plain step.
    assert costs.draft_seconds(0.525, 10000) == pytest.approx(6.0, rel=0.01)
    assert costs.round_seconds(4, 0.05, 10000) == 22.0


def test_a_draft_costs_by_its_keys_not_by_its_share():
    """Below the budget's floor all shares read as much; a line measured there is one of keys."""
    costs = RoundCosts(min_budget=200)
    for _ in range(3):
        costs.add_plain(1000, 2.0)
        costs.add_round(4, 0.2, 1000, draft=4.0, rest=3.0)
    for length in range(1000, 8001, 100):
        costs.add_plain(length, 1.0 + length / 1000)
    assert costs.keys(0.02, 8000) == 200
    assert costs.draft_seconds(0.02, 8000) == pytest.approx(1.0)
    assert 1.0 < costs.draft_seconds(0.2, 8000) < 4.0


def test_rounds_whose_verify_passes_are_as_wide_cost_the_same_rest():
    costs = RoundCosts(min_budget=100)
    costs.add_plain(10000, 6.0)
    for _ in range(2):
        costs.add_round(2, 0.05, 10000, draft=2.0, rest=12.0, width=9)
    assert costs.rests((1, 2, 6, 8), 10000) == [12.0] * 4
    assert costs.measured(8, 0.05) == costs.measured(1, 0.05) == 2
    assert costs.rest_seconds(16, 10000) == 18.0, "a line tells of wider ones"
    costs.add_round(10, 0.05, 10000, draft=10.0, rest=17.0, width=17)
    assert costs.rests((6, 8, 10, 12, 16), 10000) == [12.0, 12.0, 17.0, 17.0, 17.0]
    # Where passes are as wide as their drafts need, that holds for their k.
    costs.add_round(2, 0.05, 10000, draft=2.0, rest=8.0, width=3)
    assert costs.rest_seconds(2, 10000) == 8.0
    assert costs.rest_seconds(12, 10000) == 17.0


def test_a_draft_slower_than_plain_decoding_is_believed():
    costs = RoundCosts(min_budget=10)
    costs.add_plain(100, 1.0)
    costs.add_round(2, 0.1, 100, draft=2 * 1.5, rest=2.0)
    assert costs.draft_seconds(0.1, 100) == 1.5
    assert costs.draft_seconds(0.5, 100) == 1.5


def test_chances_follow_what_was_accepted():
    seen = PositionAcceptance()
    for _ in range(200):
        seen.observe(3, [3, 1])
    first, second, third = seen.chances(3)
    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(0.5, abs=0.02)
    assert third == pytest.approx(1.0, abs=0.05)
    # A position that was never drafted is as good as the one before it.
    assert seen.chances(5)[4] == pytest.approx(third, abs=0.01)
    assert mean_tokens([first, second])[2] == pytest.approx(2.5, abs=0.05)


def test_a_row_without_a_proposal_counts_as_rejected():
    seen = PositionAcceptance()
    for _ in range(100):
        seen.observe(2, [0])
    assert seen.chances(2)[0] < 0.06


def test_text_that_changes_is_forgotten():
    seen = PositionAcceptance()
    for _ in range(200):
        seen.observe(2, [2])
    for _ in range(150):
        seen.observe(2, [0])
    assert seen.chances(1)[0] < 0.1


def test_hope_shrinks_as_rounds_are_counted():
    few, many = PositionAcceptance(), PositionAcceptance()
    few.observe(2, [1])
    for _ in range(100):
        many.observe(2, [1])
    hopes = [sum(seen.deviations(seen.chances(4))) for seen in (few, many)]
    assert hopes[0] > 1.5 * hopes[1] > 0
    outlooks = []
    for rounds in (1, 100):
        outlook = Outlook((1, 2), (1.0,), min_budget=1)
        outlook.costs.add_plain(100, 1.0)
        outlook.costs.add_round(2, 1.0, 100, draft=1.0, rest=1.0)
        for _ in range(rounds):
            outlook.add_acceptance(2, 1.0, [1])
        outlooks.append(outlook.prospects(100)[1])
    for one in outlooks:
        assert one.doubted_rate < one.rate < one.hoped_rate <= one.best_rate
    spreads = [one.hoped_rate - one.doubted_rate for one in outlooks]
    assert spreads[0] > 1.5 * spreads[1]


def test_shares_below_the_floor_are_one():
    outlook = Outlook((2,), (0.02, 0.05, 0.1, 0.2), min_budget=128)
    assert outlook.shares(500) == (0.2,)
    assert outlook.shares(2000) == (0.05, 0.1, 0.2)
    assert outlook.shares(10000) == (0.02, 0.05, 0.1, 0.2)


def test_a_share_that_was_not_tried_is_judged_by_its_neighbour():
    outlook = Outlook((4,), (0.05, 0.1), min_budget=1)
    outlook.costs.add_plain(1000, 1.0)
    for _ in range(60):
        outlook.costs.add_round(4, 0.05, 1000, draft=2.0, rest=1.2)
        outlook.add_acceptance(4, 0.05, [2])
    tried, other = outlook.prospects(1000)
    assert other.tokens > tried.tokens
    assert other.tokens < 5
    assert tried.rate == pytest.approx(tried.tokens / tried.seconds)
