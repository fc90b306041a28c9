"""Eviction policies: one contract, and what each of them prefers."""

from __future__ import annotations

import pytest

from pillarattn.engine.eviction import EVICTION_POLICIES, Candidate

OLD = Candidate("old", admitted=0, tokens=500, last_read=9, next_read=1, evicted=3)
LONG = Candidate("long", admitted=1, tokens=900, last_read=5, next_read=7, evicted=1)
NEW = Candidate("new", admitted=2, tokens=50, last_read=8, next_read=3, evicted=2)


@pytest.mark.parametrize("name", EVICTION_POLICIES.names())
def test_the_contract(name):
    policy = EVICTION_POLICIES.get(name)()
    for group in ([OLD], [OLD, LONG, NEW], [NEW, LONG]):
        assert policy.victim(group) in group
        assert policy.returning(group) in group
    blocks = policy.leaving(LONG, [0, 2, 3, 7, 9], 3)
    assert len(set(blocks)) == 3 and set(blocks) <= {0, 2, 3, 7, 9}
    assert policy.leaving(LONG, [4], 3) == [4]


@pytest.mark.parametrize(
    ("name", "victim", "returning"),
    [
        ("fifo", OLD, LONG),
        ("lifo", NEW, OLD),
        ("shortest", NEW, OLD),
        ("lru", LONG, LONG),
        ("heat", LONG, LONG),
    ],
)
def test_who_leaves_and_who_returns(name, victim, returning):
    policy = EVICTION_POLICIES.get(name)()
    assert policy.victim([OLD, LONG, NEW]) is victim
    assert policy.returning([OLD, LONG, NEW]) is returning


def test_only_heat_looks_at_scores_and_others_take_the_tail():
    hot = Candidate("a", admitted=0, tokens=64, heat=(0.5, 0.01, 0.09, 0.4))
    for name in EVICTION_POLICIES:
        wanted = [1, 2] if name == "heat" else [3, 2]
        assert EVICTION_POLICIES.get(name)().leaving(hot, [0, 1, 2, 3], 2) == wanted


def test_unmeasured_blocks_count_as_warm_at_both_ends():
    heat = EVICTION_POLICIES.get("heat")()
    assert heat.leaving(OLD, [0, 1, 2, 3], 3) == [1, 2, 3]
    measured = Candidate("a", admitted=0, tokens=64, heat=(0.5, 0.1))
    assert heat.leaving(measured, [0, 1, 2], 2) == [1, 0]
