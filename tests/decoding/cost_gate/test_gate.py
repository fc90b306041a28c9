"""The gate on simulated machines: near the best fixed setting, never far below plain decoding."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.decoding.cost_gate import REASONS, Choice, CostGate, ObservedRound
from pillarattn.decoding.cost_gate.gate import KS, SS, WARM_ROUNDS, WARM_STEPS
from tests.decoding.cost_gate.simulated_machine import Always, Machine, best_fixed, play

STARTS = (500, 4000, 16000)


def compared(seed, *, tokens, batch, start=None, ss=SS):
    """Return how much of the best fixed setting's speed, and of plain's, a run reaches."""
    machine = Machine.random(seed)
    options = {
        "start": start or STARTS[seed % len(STARTS)],
        "tokens": tokens,
        "batch": batch,
        "seed": seed,
    }
    best, *_ = best_fixed(machine, KS, ss, **options)
    plain = play(machine, Always(0, ss[0]), **options).seconds
    played = play(machine, CostGate(ss=ss), **options)
    return best / played.seconds, plain / played.seconds


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "first", "worst"), [(1, 100, 0.92), (8, 200, 0.95)])
def test_a_long_run_is_near_the_best_setting(batch, first, worst):
    """One sequence tells little of small differences: there, nineteen of twenty runs are near."""
    found = [compared(seed, tokens=4000, batch=batch) for seed in range(first, first + 24)]
    near = [best >= 0.95 for best, _ in found]
    assert sum(near) >= 0.95 * len(near)
    assert min(best for best, _ in found) >= worst
    assert min(plain for _, plain in found) >= 0.97


@pytest.mark.slow
def test_a_context_that_grows_is_followed():
    found = [compared(seed, tokens=12000, batch=4, start=500) for seed in range(30, 38)]
    assert min(best for best, _ in found) >= 0.95
    assert min(plain for _, plain in found) >= 0.97


@pytest.mark.parametrize("seed", range(6))
def test_plain_decoding_is_kept_where_nothing_pays(seed):
    """Drafts that cost as much as tokens, and are seldom right."""
    machine = Machine.random(seed, read=0.0, more_rows=0.2, miss=0.8, draft_overhead=0.2)
    options = {"start": 1000, "tokens": 1500, "batch": 2, "seed": seed}
    plain = play(machine, Always(0, 0.05), **options).seconds
    played = play(machine, CostGate(), **options)
    assert plain / played.seconds >= 0.97
    assert played.choices[-1][1] == 0


def test_speculation_is_found_where_all_reads_are_of_the_context():
    machine = Machine.random(3, read=1e-5, row=1e-3, more_rows=0.01, miss=0.1, power=0.1)
    played = play(machine, CostGate(ss=(0.05,)), start=16000, tokens=600)
    drafts = [k for _, k, _, _ in played.choices]
    assert drafts[-1] >= 4
    assert drafts.count(0) <= 3


def test_it_leaves_plain_decoding_as_the_context_grows():
    """At 300 tokens a draft reads all keys; at 20,000 a fiftieth."""
    machine = Machine.random(
        1, row=1e-2, read=2e-6, more_rows=0.02, draft_overhead=0.1, miss=0.1, power=0.1,
        verify_read=1.2, select=0.0, step_at=100,
    )  # fmt: skip
    played = play(machine, CostGate(ss=(0.05,)), start=300, tokens=20000)
    early = [why for length, _, _, why in played.choices if length < 900]
    assert "speculation pays" not in early
    late = [k for length, k, _, _ in played.choices if length > 18000]
    assert sum(k > 0 for k in late) > 0.8 * len(late)


def test_it_goes_back_to_plain_decoding_when_acceptance_falls():
    machine = Machine.random(3, read=1e-5, row=1e-3, more_rows=0.01, miss=0.1, power=0.1)
    gate = CostGate(ss=(0.05,))
    play(machine, gate, start=16000, tokens=600)
    assert gate.choice.k > 0
    machine.miss = 1.0
    later = play(machine, gate, start=16600, tokens=1500)
    drafted = [k for _, k, _, _ in later.choices[len(later.choices) // 2 :]]
    assert drafted.count(0) > 0.7 * len(drafted)


def test_the_first_rounds_measure_and_try():
    gate = CostGate(ss=(0.05,))
    first = gate.choose(1000, 500)
    assert (first.k, first.rounds, first.reason) == (0, WARM_STEPS, "measure plain")
    for _ in range(WARM_STEPS):
        gate.observe(ObservedRound(0, 0.05, 1000, 0.0, 0.01, [0]))
    for _ in range(WARM_ROUNDS):
        trial = gate.choose(1003, 490)
        assert (trial.k, trial.reason) == (2, "first probe")
        gate.observe(ObservedRound(trial.k, 0.05, 1003, 0.004, 0.015, [2]))
    assert gate.choose(1010, 480).reason == "speculation pays"


def test_one_stall_decides_nothing():
    """The first pass of each kind takes a second: it compiles."""
    machine = Machine.random(3, read=1e-5, row=1e-3, more_rows=0.01, miss=0.1, power=0.1, noise=0.0)
    gate = CostGate(ss=(0.05,))
    for seconds in (1.0, machine.plain(16000), machine.plain(16001)):
        gate.observe(ObservedRound(0, 0.05, 16000, 0.0, seconds, [0]))
    for factor in (100.0, 1.0, 1.0):
        choice = gate.choose(16010, 1000)
        draft = choice.k * machine.draft(0.05, 16010) * factor
        rest = machine.rest(choice.k, 16010) * factor
        gate.observe(ObservedRound(choice.k, 0.05, 16010, draft, draft + rest, [choice.k]))
    assert gate.choose(16020, 1000).k > 0
    assert gate.lost_seconds < 4 * machine.plain(16000)


def test_a_short_generation_is_not_tried_on():
    gate = CostGate()
    for _ in range(WARM_STEPS):
        gate.choose(1000, 30)
        gate.observe(ObservedRound(0, 0.05, 1000, 0.0, 0.01, [0]))
    assert gate.choose(1003, 27).reason == "too few tokens left"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), ragged=st.booleans())
def test_any_times_and_any_acceptance_give_valid_choices(seed, ragged):
    draw = random.Random(seed)
    gate = CostGate(min_budget=draw.choice([1, 128, 4096]))
    length = draw.choice([1, 7, 3000])
    for _ in range(150):
        choice = gate.choose(length, draw.choice([1, 5, 10000]))
        assert isinstance(choice, Choice)
        assert choice.k == 0 or choice.k in KS
        assert choice.s in SS
        assert choice.rounds >= 1
        assert choice.reason in REASONS
        for _ in range(choice.rounds):
            seconds = draw.choice([0.0, 1e-9, 10 ** draw.uniform(-4, 1)])
            rows = draw.randint(0, 3) if ragged else 1
            accepted = [draw.randint(0, choice.k) for _ in range(rows)]
            usual = draw.random() < 0.8
            gate.observe(
                ObservedRound(
                    choice.k, choice.s, length, seconds * draw.random(), seconds, accepted, usual
                )
            )
            length += draw.choice([1, 1 + choice.k, 500])


@pytest.mark.parametrize("options", [{"ks": ()}, {"ks": (0, 2)}, {"ss": ()}, {"ss": (0.1, 1.5)}])
def test_nothing_to_choose_from_is_refused(options):
    with pytest.raises(ValueError, match="a gate chooses from"):
        CostGate(**options)
