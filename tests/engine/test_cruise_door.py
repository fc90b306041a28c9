"""Those who wait come in together: a few of them, or all, or somebody after a while."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pillarattn.engine import cruise_door
from pillarattn.engine.cruise_door import LONGEST_WAIT, SHARE, CruiseDoor
from pillarattn.engine.request import SamplingParams

MEMBERS = 4 * SHARE


class Queue:
    """A scheduler of `waiting` requests beside those that cruise, of whom `fitting` fit."""

    def __init__(self, waiting, fitting=0):
        self.entries = dict.fromkeys(map(str, range(MEMBERS + waiting)))
        self.pool, self.step, self.fitting = SimpleNamespace(free=0), 0, fitting
        self.asked = 0

    def admits(self, most):
        self.asked += 1
        return min(self.fitting, most)

    def end(self):
        """Let a request end, whose blocks are free then."""
        self.fitting += 1
        self.pool.free += 1


@pytest.mark.parametrize(("waiting", "needed"), [(100, MEMBERS // SHARE), (3, 3), (1, 1)])
def test_a_few_or_all_that_wait_come_in_together(waiting, needed):
    queue = Queue(waiting)
    door = CruiseDoor(queue)
    for ended in range(needed):
        assert not door.opens(MEMBERS), ended
        queue.end()
        queue.step += 1
    assert door.opens(MEMBERS)


def test_few_that_cruise_let_everybody_in():
    queue = Queue(0)
    queue.entries = dict.fromkeys(map(str, range(SHARE + 50)))
    door = CruiseDoor(queue)
    assert not door.opens(SHARE)
    queue.end()
    assert door.opens(SHARE)


def test_nobody_waits_for_ever():
    queue = Queue(100, fitting=1)
    door = CruiseDoor(queue)
    for queue.step in range(LONGEST_WAIT):
        assert not door.opens(MEMBERS)
    queue.step = LONGEST_WAIT + cruise_door.ASK_AGAIN
    assert door.opens(MEMBERS)
    # The next cruise begins to count anew.
    door.begin()
    assert not door.opens(MEMBERS)


def test_a_queue_is_not_asked_in_vain():
    queue = Queue(100)
    door = CruiseDoor(queue)
    for queue.step in range(80):
        assert not door.opens(MEMBERS)
    assert queue.asked == 80 // cruise_door.ASK_AGAIN
    # Those who have ended are among the entries until the step after it.
    assert not CruiseDoor(Queue(0)).opens(MEMBERS)


def test_an_engine_stops_less_often_and_gives_the_same_tokens(cruising, monkeypatch):
    rng = random.Random(0)
    work = [
        ([rng.randrange(1, 97) for _ in range(rng.randint(4, 12))], rng.randint(12, 40))
        for _ in range(60)
    ]
    found = {}
    # Of twelve that cruise a sixteenth is one: whoever fits comes in.
    for share in (SHARE, 3):
        monkeypatch.setattr(cruise_door, "SHARE", share)
        run, stops = cruising(k=3, max_batch=12, kv_tokens=4096), 0
        leave = run.cruise.leave

        def counted(leave=leave, run=run):
            nonlocal stops
            stops += run.cruise.is_on
            leave()

        run.cruise.leave = counted
        names = [run.add_request(p, SamplingParams(max_tokens=n)) for p, n in work]
        done = {}
        while run.has_unfinished:
            done |= {o.request_id: o.token_ids for o in run.step() if o.finished}
            run.scheduler.check()
        found[share] = stops, [done[name] for name in names]
    assert found[3][1] == found[SHARE][1]
    assert 3 * found[3][0] < 2 * found[SHARE][0]
