"""Steps without plans that raise or are interrupted: nothing is lost, and nobody else is harmed."""

from __future__ import annotations

import pytest

from pillarattn.engine.cruise import Landing
from pillarattn.engine.cruise_rounds import CruiseRounds
from pillarattn.engine.request import SamplingParams
from tests.engine.test_cruise import to_the_end, until_it_cruises

LONG = SamplingParams(max_tokens=40)


class Reports:
    """A report that may be asked for again."""

    def __init__(self, report):
        self.report = report

    def ask(self):
        return self.report()


def broken_once(monkeypatch, owner, place, error=MemoryError, before=False):
    """Let a method raise the next time that it is called, after its work or before."""
    work = getattr(owner, place)

    def broken(*arguments, **options):
        monkeypatch.setattr(owner, place, work)
        if not before:
            work(*arguments, **options)
        raise error("broken")

    monkeypatch.setattr(owner, place, broken)


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("place", "error", "raises"),
    [
        ("pass", MemoryError, True), ("advance", MemoryError, False), ("end", MemoryError, True),
        ("advance", KeyboardInterrupt, True), ("lengthen", MemoryError, True),
        ("landing", KeyboardInterrupt, True), ("waiting", KeyboardInterrupt, True),
    ],
)  # fmt: skip
def test_a_step_that_raises_loses_nothing(
    cruising, prompts, alone, monkeypatch, place, error, raises, before, k
):
    run = cruising(k=k, block_size=1)
    names = [run.add_request(p, LONG) for p in prompts[:4]]
    until_it_cruises(run)
    for _ in range(3):
        run.step()
    if place == "waiting":
        while not run.cruise._landings:
            run.step()
        landing = run.cruise._landings[0]
        broken_once(monkeypatch, Reports, "ask", error, before=True)
        reports = Reports(landing.report)
        run.cruise._landings[0] = Landing(landing.members, lambda: reports.ask())
    else:
        owner, name = {
            "pass": (run.runner, "_steady"), "advance": (run.cruise.rounds, "advance"),
            "end": (run.cruise, "_leave_out"), "lengthen": (run.runner.buffers, "lengthen"),
            "landing": (run._decoders[names[2]], "end_round"),
        }[place]  # fmt: skip
        broken_once(monkeypatch, owner, name, error, before)
    failures = 0
    done = {}
    for _ in range(400):
        if not run.has_unfinished:
            break
        try:
            done |= {o.request_id: o for o in run.step() if o.finished}
        except error:
            failures += 1
    assert failures == raises
    for name, prompt in zip(names, prompts, strict=False):
        assert done[name].token_ids == alone(prompt, 40)
    run.scheduler.check()


@pytest.mark.parametrize("place", ["new_rounds", "begin"])
def test_a_cruise_that_cannot_begin_leaves_plans(cruising, prompts, alone, monkeypatch, place):
    run = cruising()
    names = [run.add_request(p, LONG) for p in prompts]
    owner = run.cruise if place == "new_rounds" else CruiseRounds
    broken_once(monkeypatch, owner, place)
    done, failures = {}, 0
    while run.has_unfinished:
        try:
            done |= {o.request_id: o for o in run.step() if o.finished}
        except MemoryError:
            failures += 1
            assert not run.cruise.is_on
    assert failures == 1
    assert [done[n].token_ids for n in names] == [alone(p, 40) for p in prompts]


def test_who_raises_fails_alone(cruising, prompts, alone, monkeypatch):
    run = cruising()
    names = [run.add_request(p, LONG) for p in prompts]
    until_it_cruises(run)
    decoder = run._decoders[names[2]]

    def broken(targets, drafts):
        raise RuntimeError("no")

    monkeypatch.setattr(decoder, "end_round", broken)
    done = to_the_end(run)
    assert done[names[2]].error == "RuntimeError: no"
    for name, prompt in zip(names, prompts, strict=True):
        if name != names[2]:
            assert done[name].token_ids == alone(prompt, 40)
