"""Who drafts and who verifies while rounds follow each other: in numbers alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.engine.cruise_schedule import CruiseSchedule


@st.composite
def requests(draw):
    """Return k, and drafts that requests have."""
    k = draw(st.integers(0, 9))
    return k, draw(st.lists(st.integers(0, k), min_size=1, max_size=40))


@given(requests())
def test_every_request_goes_from_round_to_round(case):
    k, drafted = case
    schedule = CruiseSchedule(drafted, k)
    done = list(drafted)
    verified = [0] * len(drafted)
    steps = schedule.longest_wait + 3 * (k + 1)
    for step in range(steps):
        assert schedule.drafted(step) == done
        rows = schedule.rows(step)
        assert sorted([*rows.drafting, *rows.verifying, *rows.idle]) == list(range(len(drafted)))
        assert len(rows.verifying) <= schedule.most
        for owner, row in zip(rows.drafting, rows.draft_rows, strict=True):
            assert rows.owners[row] == owner
            assert rows.offsets[row] == done[owner] < k
            done[owner] += 1
        for owner, own in zip(rows.verifying, rows.verify_rows, strict=True):
            assert (rows.owners[own] == owner).all()
            assert rows.offsets[own].tolist() == list(range(k + 1))
            assert done[owner] == k
            done[owner] = 0
            verified[owner] += 1
        assert step < schedule.longest_wait or not len(rows.idle)
        assert np.array_equal(rows.owners, np.sort(rows.owners))
        assert len(rows.owners) == len(rows.drafting) + (k + 1) * len(rows.verifying)
    assert min(verified) >= 3 - (1 if schedule.longest_wait else 0) or k == 0
    assert max(verified) <= 4 + schedule.longest_wait


@given(requests())
def test_rows_are_level(case):
    """No step has more rows than a tenth above the level, but for one verify pass."""
    k, drafted = case
    schedule = CruiseSchedule(drafted, k)
    level = len(drafted) * (2 * k + 1) / (k + 1)
    for step in range(schedule.longest_wait + k + 1):
        assert len(schedule.rows(step).owners) <= max(1.1 * level, level + k)


@given(requests(), st.integers(0, 60))
def test_steps_of_a_kind_have_the_same_rows(case, step):
    k, drafted = case
    schedule = CruiseSchedule(drafted, k)
    kinds = {schedule.kind(other): other for other in range(schedule.longest_wait + k + 1)}
    assert len(kinds) <= schedule.longest_wait + k + 1
    same = kinds[schedule.kind(step)]
    ours, theirs = schedule.rows(step), schedule.rows(same)
    assert np.array_equal(ours.owners, theirs.owners)
    assert np.array_equal(ours.offsets, theirs.offsets)


def test_who_need_not_wait_does_not():
    assert CruiseSchedule([0, 1, 2, 3, 0, 1, 2, 3], 3).longest_wait == 0
    # All at once: they spread over the round.
    spread = CruiseSchedule([0] * 8, 3)
    assert spread.most == 2 and spread.longest_wait == 3
    assert [len(spread.rows(step).verifying) for step in range(3, 7)] == [2, 2, 2, 2]
