"""Phases: the rows of a step stay level under the unified policy, and spike under lockstep."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.engine.phases import (
    PHASE_POLICIES,
    LockstepPhases,
    Progress,
    UnifiedPhases,
    level_rows,
)


def advance(phases):
    """Apply a step; return the drafts that each verify pass judged."""
    judged = [p.drafted for p in phases.verifies]
    for p in phases.verifies:
        p.drafted = p.waited = 0
    for p in phases.drafts:
        p.drafted += 1
    return judged


def test_the_level_of_the_papers_batch():
    running = [Progress(str(i), 8) for i in range(128)]
    assert level_rows(running) == pytest.approx(241.78, abs=0.01)


@pytest.mark.parametrize("policy", PHASE_POLICIES.names())
@given(
    sizes=st.lists(st.integers(0, 9), min_size=0, max_size=20), steps=st.integers(1, 40),
    seed=st.integers(0, 10),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_everybody_does_one_thing_in_each_step_and_nobody_drafts_past_k(policy, sizes, steps, seed):
    policy, draw = PHASE_POLICIES.get(policy)(), random.Random(seed)
    running = [Progress(str(i), k) for i, k in enumerate(sizes)]
    for step in range(steps):
        phases = policy.split(running)
        everybody = [p.request_id for p in (*phases.drafts, *phases.verifies, *phases.idle)]
        assert sorted(everybody) == sorted(p.request_id for p in running)
        assert all(p.drafted < p.k for p in phases.drafts)
        if running:
            assert phases.drafts or phases.verifies, "a step in which nobody moves"
        advance(phases)
        if running and draw.random() < 0.2:
            running.remove(draw.choice(running))
        if draw.random() < 0.2:
            running.append(Progress(f"new{step}", draw.randrange(9)))


@pytest.mark.parametrize("batch", [64, 128, 256])
@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_rows_stay_within_a_tenth_through_departures_and_arrivals(batch, k, seed):
    """Departures and arrivals one by one, and now and then a whole phase leaves at once."""
    draw, policy = random.Random(seed), UnifiedPhases()
    running = [Progress(str(i), k) for i in range(batch)]
    judged, gaps = [], 0
    for step in range(400):
        phases = policy.split(running)
        if step > k:
            level = level_rows(running)
            # A verify pass cannot be split: with few requests one of them exceeds a tenth.
            assert abs(phases.rows - level) <= max(0.1 * level, k + 1)
            judged += advance(phases)
        else:
            advance(phases)
        if draw.random() < 0.3 and len(running) > batch // 2:
            running.remove(draw.choice(running))
        if draw.random() < 0.4 and len(running) < batch:
            running.append(Progress(f"new{step}", k))
        if step % 100 == 50:
            phase, before = draw.randrange(k + 1), len(running)
            running = [p for p in running if p.drafted != phase]
            gaps += before - len(running)
    assert gaps > 0
    assert sum(judged) / len(judged) > 0.93 * k, "levelling must not eat the drafts"


def test_a_request_alone_drafts_all_and_then_verifies():
    policy, one = UnifiedPhases(), Progress("a", 8)
    judged = [drafts for _ in range(90) for drafts in advance(policy.split([one]))]
    assert judged == [8] * 10


@pytest.mark.parametrize("policy", PHASE_POLICIES.names())
@pytest.mark.parametrize("seed", range(40))
def test_few_requests_never_all_stand_idle(policy, seed):
    """A request left over may be due before it has earned its pass: nobody gains if it waits."""
    draw, policy = random.Random(seed), PHASE_POLICIES.get(policy)()
    running = [Progress(str(i), draw.choice([2, 4, 8])) for i in range(draw.randint(2, 4))]
    for step in range(60):
        phases = policy.split(running)
        assert phases.rows > 0, f"step {step}: {running}"
        advance(phases)
        if len(running) > 1 and draw.random() < 0.2:
            running.remove(draw.choice(running))
        if draw.random() < 0.1:
            running.append(Progress(f"new{step}", draw.choice([2, 4, 8])))
        if draw.random() < 0.05:
            # Evicted and back again, without its drafts.
            stopped = draw.choice(running)
            stopped.drafted = stopped.waited = 0


class Counted(Progress):
    """Counts how often any two are compared, or asked whether they are due."""

    calls = 0

    def __eq__(self, other):
        Counted.calls += 1
        return self is other

    @property
    def is_due(self):
        Counted.calls += 1
        return self.drafted >= self.k


@pytest.mark.parametrize("policy", PHASE_POLICIES.names())
def test_a_step_costs_a_few_looks_at_each_request(policy):
    policy, running = PHASE_POLICIES.get(policy)(), [Counted(str(i), 2) for i in range(200)]
    advance(policy.split(running))
    running += [Counted(f"new{i}", 2) for i in range(200)]
    Counted.calls = 0
    for _ in range(6):
        advance(policy.split(running))
    assert Counted.calls < 6 * 10 * len(running)


def test_a_start_all_at_once_spreads_within_one_round():
    policy, running = UnifiedPhases(), [Progress(str(i), 8) for i in range(128)]
    rows = []
    for _ in range(40):
        phases = policy.split(running)
        rows.append(phases.rows)
        advance(phases)
    assert max(rows) < 1.1 * 241.8
    assert min(rows[8:]) > 0.9 * 241.8


def test_lockstep_spikes():
    policy, running = LockstepPhases(), [Progress(str(i), 8) for i in range(128)]
    rows = []
    for _ in range(27):
        phases = policy.split(running)
        rows.append(phases.rows)
        advance(phases)
    assert rows == ([128] * 8 + [1152]) * 3


def test_lockstep_newcomers_wait_for_the_next_round():
    policy, first, late = LockstepPhases(), Progress("a", 2), Progress("b", 2)
    advance(policy.split([first]))
    idle = []
    for _ in range(5):
        phases = policy.split([first, late])
        idle.append([p.request_id for p in phases.idle])
        advance(phases)
    assert idle == [["b"], ["b"], [], [], []]


def test_requests_with_a_k_of_their_own_keep_the_level():
    """Passes of 3 to 16 rows: a step is within two of the longest ones of the level."""
    policy, draw = UnifiedPhases(), random.Random(0)
    running = [Progress(str(i), draw.choice([0, 2, 8, 15])) for i in range(128)]
    for step in range(200):
        phases = policy.split(running)
        if step > 32:
            assert abs(phases.rows - level_rows(running)) <= 2 * 16
        assert all(p in phases.verifies for p in running if p.k == 0)
        advance(phases)
