"""The simulator: the same work under every policy, nothing lost on the way, and known costs."""

from __future__ import annotations

import pytest

from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.simulator import RESERVE, Machine, Simulation, Workload, compare

SMALL = Workload(requests=40, mean=300, deviation=300, max_tokens=1200, max_batch=16, chunk=64)
POLICIES = [RESERVE, *EVICTION_POLICIES.names()]


@pytest.mark.parametrize("policy", POLICIES)
def test_all_work_is_done_and_all_that_left_came_back(policy):
    (outcome,) = compare([policy], SMALL, Machine(kv_tokens=2600))
    assert outcome.tokens == sum(SMALL.lengths())
    assert outcome.bytes_in == outcome.bytes_out
    assert (outcome.bytes_out > 0) == (outcome.evictions > 0) == (policy != RESERVE)
    assert outcome.seconds > 0
    again = Simulation(policy, SMALL, Machine(kv_tokens=2600)).run()
    assert again == outcome


def test_with_room_for_all_nobody_is_evicted_and_policies_are_alike():
    outcomes = compare(POLICIES, SMALL, Machine(kv_tokens=10**6))
    assert {o.bytes_out for o in outcomes} == {o.stall_seconds for o in outcomes} == {0.0}
    assert len({o.seconds for o in outcomes}) == 1


def test_memory_is_never_exceeded():
    class Watched(Simulation):
        def _step(self):
            held = sum(r.tokens - r.missing for r in self.active)
            # What is on its way out still holds its place; what is to come in has none yet.
            held += sum(n for end, n in self._leaving if end > self.now)
            held -= sum(n for begin, n in self._coming if begin > self.now)
            assert held <= self.machine.kv_tokens
            super()._step()

    for policy in POLICIES:
        Watched(policy, SMALL, Machine(kv_tokens=2600)).run()


def test_reservation_wastes_the_room_of_outputs_that_end_early():
    reserve, lifo = compare([RESERVE, "lifo"], SMALL, Machine(kv_tokens=2600))
    assert reserve.mean_batch < 3
    assert lifo.mean_batch > 2 * reserve.mean_batch
    assert lifo.seconds < 0.8 * reserve.seconds


def test_cold_blocks_of_running_requests_cross_the_link_in_every_round():
    """Why heat needs a fast link: each verify pass reads what its request gave up."""
    slow, fast = Machine(kv_tokens=2600), Machine(kv_tokens=2600, link=5e12)
    heat, lifo = compare(["heat", "lifo"], SMALL, slow)
    assert heat.bytes_out > 5 * lifo.bytes_out
    quick, lifo = compare(["heat", "lifo"], SMALL, fast)
    assert quick.stall_seconds < lifo.stall_seconds
    assert quick.seconds < heat.seconds


def test_a_request_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="may reach 1340 tokens and the pool holds 1000"):
        compare(["lifo"], SMALL, Machine(kv_tokens=1000))
