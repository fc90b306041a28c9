"""The gate in simulated seconds, alone and in an engine that cruises: it is near the better way.

Steps take what they took on a GPU in shape: those that are recorded are slow twice, drafts pay
while the batch is full, and a few requests that are left are as fast without.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from pillarattn.engine import engine as engine_module
from pillarattn.engine.cruise_rounds import CruiseRounds
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.row_buckets import RowBuckets
from pillarattn.engine.speculation_gate import LONGEST_HOLD, PATIENCE, SpeculationGate
from tests.engine.test_cruise_recorded import FrozenGraphs

REQUESTS, NEW, K = 12, 260, 4
# Seconds of a step that runs eagerly, that is recorded, and that has a plan.
EAGER, RECORDED, PLANNED = 0.045, 0.07, 0.02


def replayed(k, members):
    """Return the seconds of a recorded step of so many requests."""
    share = members / REQUESTS
    return 0.004 + 0.0075 * share if k else 0.004 + 0.02 * share


class TimedGraphs(FrozenGraphs):
    """Lets a clock go on as a step would."""

    def __init__(self, clock, cruise):
        super().__init__()
        self.clock, self.cruise, self.recorded = clock, cruise, 0
        self.is_usual = False

    def run(self, kind, generation, play, *, live):
        is_known = generation == self.generation and kind in self.plays
        self.is_usual = bool(live is None and is_known and self.plays[kind] is not None)
        if self.is_usual:
            self.clock[0] += replayed(self.cruise.rounds.k, len(self.cruise._members))
        else:
            self.clock[0] += EAGER if live is not None or not is_known else RECORDED
            self.recorded += 1
        return super().run(kind, generation, play, live=live)


@pytest.fixture
def seconds(cruising, monkeypatch):
    """Return `seconds(speculative)`: what requests that accept differently take, and the engine."""
    clock, noise = [0.0], torch.Generator()
    monkeypatch.setattr(engine_module, "perf_counter", lambda: clock[0])

    def judged(self, form, drawn):
        if not self.k or not form.judged:
            return drawn
        rows, drafts = form.verify_rows.view(form.judged, -1), self.tokens[form.verify_seats, 1:]
        chance = 0.6 + 0.39 * ((form.verify_seats * 7) % REQUESTS / REQUESTS).unsqueeze(1)
        stands = torch.rand(drafts.shape, generator=noise) < chance
        where = torch.where(form.real.unsqueeze(1) > 0, rows[:, : self.k], len(drawn))
        longer = torch.cat([drawn, drawn.new_zeros(1)])
        return longer.index_put((where,), torch.where(stands, drafts, (drafts + 1) % 64))[:-1]

    monkeypatch.setattr(CruiseRounds, "judged", judged)

    def run(speculative):
        clock[0] = 0.0
        noise.manual_seed(0)
        engine = cruising(
            k=K, speculative=speculative, kv_tokens=REQUESTS * 400, prefix_cache=False,
            max_batch=REQUESTS, prefill_chunk=1024,
        )  # fmt: skip

        def renew():
            engine.runner.graphs = TimedGraphs(clock, engine.cruise)
            engine.runner._row_buckets = RowBuckets(engine.runner.graphs)

        engine.runner._renew_graphs, planned = renew, engine.runner.run

        def timed(*given):
            clock[0] += PLANNED
            return planned(*given)

        engine.runner.run = timed
        params = SamplingParams(max_tokens=NEW, ignore_eos=True)
        engine.generate([[5 + i] * 9 for i in range(REQUESTS)], params)
        return clock[0], engine

    return run


def test_it_loses_little_to_the_better_way(seconds):
    """A few hundred steps, of which its trials are a good part."""
    plain = NEW * replayed(0, REQUESTS)
    drafting, _ = seconds(True)
    chosen, run = seconds("auto")
    assert drafting < 0.95 * plain
    # Plain decoding alone would lose 9 %.
    assert chosen < 1.07 * drafting
    # It has turned more than once, and nobody recorded each number of rows.
    assert run._gate.trials > 1
    assert run.runner.graphs.recorded < 30


class Machine:
    """Steps of 64 requests as they take on a GPU, of either way.

    Args:
        k: drafts of a round.
        drafting: how many times as fast drafts are as none.
        growth: steps until the memory grows, and all recordings are lost.
        compiled: seconds of the first steps of a way.
        level: whether as many requests verify in each step; False: all at once.
        replays: False runs everything eagerly, of ever other kinds.
    """

    REQUESTS, PLAIN = 64, 0.0036

    def __init__(self, *, k=4, drafting=1.3, growth=300, compiled=(3.0, 2.0, 1.5), level=True,
                 replays=True):  # fmt: skip
        self.k, self.growth, self.level, self.replays = k, growth, level, replays
        # Of k drafts four fifths stand.
        self.per_round = self.REQUESTS * (1 + 0.8 * k)
        self.usual = {False: self.PLAIN}
        self.usual[True] = self.PLAIN * (1 + 0.8 * k) / (k + 1) / drafting
        self.compiled = {way: list(compiled) for way in (True, False)}
        self.proven, self.runs, self.planned, self.begun, self.step = set(), {}, 3, 0, 0
        self.is_idle = False

    def next(self, drafts):
        """Return the next step: seconds, tokens, whether it is usual and whether it cruises."""
        if self.step and self.step % self.growth == 0:
            # Some steps have plans then.
            self.runs, self.planned = {}, 2
        self.step += 1
        self.begun += 1
        cruises, self.planned = not self.planned, max(self.planned - 1, 0)
        # Drafts that are planned take turns of two sizes of steps.
        kind = drafts, cruises, drafts and not cruises and self.begun % 2
        count = self.runs[kind] = self.runs.get(kind, 0) + 1
        seconds, is_usual = self.usual[drafts] if cruises else PLANNED, False
        if count == 1 or not self.replays:
            seconds = EAGER
        elif count == 2:
            seconds = RECORDED
        elif count == 3 and kind not in self.proven:
            self.proven.add(kind)
            seconds = EAGER + seconds
        elif self.is_idle:
            # It does not wait for the device.
            is_usual, seconds = True, 0.4 * seconds
        else:
            is_usual = True
        if self.compiled[drafts]:
            seconds += self.compiled[drafts].pop(0)
        self.is_idle = not is_usual
        return seconds, self._tokens(drafts), is_usual, cruises

    def _tokens(self, drafts):
        if not drafts:
            return self.REQUESTS
        period = self.k + 1
        if self.level:
            return self.per_round / period
        return self.per_round if self.step % period == 0 else 0


class Fixed:
    """A gate that never turns."""

    def __init__(self, drafts):
        self.drafts = drafts

    def stepped(self, *given, **named):
        pass


def rate(gate, machine, steps=2000, first=100):
    """Return the tokens a second of a machine's steps after the first ones."""
    spent = brought = 0.0
    for step in range(first + steps):
        seconds, tokens, is_usual, cruises = machine.next(gate.drafts)
        gate.stepped(seconds, tokens, machine.REQUESTS, is_usual=is_usual, cruises=cruises)
        if step >= first:
            spent, brought = spent + seconds, brought + tokens
    return brought / spent


@pytest.mark.parametrize("level", [True, False])
@pytest.mark.parametrize("k", [4, 6])
@pytest.mark.parametrize("growth", [170, 300, 450, 10000])
@pytest.mark.parametrize("compiled", [(), (3.0, 2.0, 1.5)])
@pytest.mark.parametrize("drafting", [1.3, 1 / 1.3])
def test_steps_that_record_do_not_count(drafting, compiled, growth, k, level):
    """They are twenty times and more as long as others, and come wherever it turns."""
    given = {"k": k, "drafting": drafting, "compiled": compiled, "growth": growth, "level": level}
    better = rate(Fixed(drafting > 1), Machine(**given))
    assert rate(SpeculationGate(k), Machine(**given)) > 0.97 * better


@pytest.mark.parametrize("way", ["plain", "drafts"])
def test_where_nothing_is_ever_usual_it_decides(way):
    """A step of ever other kinds takes the same time with drafts: these lose, or bring more."""
    gate, machine = SpeculationGate(4), Machine(replays=False)
    if way == "drafts":
        machine.per_round *= 2
    rate(gate, machine, steps=6 * PATIENCE, first=0)
    assert gate.trials > 0
    assert gate.drafts == (way == "drafts")


@pytest.mark.parametrize("every", [1, 2, 7, 19])
def test_who_cruises_by_turns_is_measured(every):
    """Steps with plans and without them mix, and none of them keeps it from deciding."""
    gate = SpeculationGate(4)
    for step in range(3000):
        seconds, tokens = (0.7, 50) if gate.drafts else (1.0, 64)
        gate.stepped(seconds, tokens, 64, cruises=step // every % 2 > 0)
        if step == 8 * PATIENCE:
            # Both ways are known.
            assert gate.trials > 0
    assert gate.drafts


def test_steps_with_plans_do_not_count_against_what_follows():
    """Drafts are measured while the engine begins to cruise, and plain steps after it."""
    gate = SpeculationGate(4)
    for step in range(300):
        usual = 0.7 if gate.drafts else 1.0
        # Ten steps settle; some of the window have plans.
        seconds = 5 * usual if step < 18 else usual
        gate.stepped(seconds, 50 if gate.drafts else 64, 64, cruises=step >= 18)
    assert gate.trials == 1 and gate.drafts


def test_rounds_are_left_out_as_wholes():
    """All requests verify in one step of five, which is the one that is recorded now and then."""
    gate = SpeculationGate(4)
    for step in range(2000):
        drafting, verifies = gate.drafts, step % 5 == 4
        tokens = (5 * 50 if verifies else 0) if drafting else 64
        usual = 0.7 if drafting else 1.0
        is_usual = step % 20 != 4
        gate.stepped(usual if is_usual else 20.0, tokens, 64, is_usual=is_usual, cruises=True)
    assert gate.drafts


def test_a_step_that_need_not_wait_does_not_count():
    """The device is done when a recording is: the next step seems short, and drafts lose here."""
    gate = SpeculationGate(4)
    for step in range(1000):
        seconds = (20.0, 0.2, 0.86)[min(step % 7, 2)] if gate.drafts else 1.0
        is_usual = step % 7 > 0 or not gate.drafts
        gate.stepped(seconds, 50 if gate.drafts else 64, 64, is_usual=is_usual, cruises=True)
        if step == 500:
            assert gate.trials > 0 and not gate.drafts


def test_a_lost_trial_is_paid_off_before_the_next_one():
    """What recording took counts, though not for the rate; there is an end to it."""
    held = []
    for price in (0.0, 40.0, 1e6):
        gate, steps = SpeculationGate(4), []
        for step in range(2 * LONGEST_HOLD * 15):
            is_first = not gate.drafts and (not steps or steps[-1] < step - 1)
            if not gate.drafts:
                steps.append(step)
            seconds = 0.7 if gate.drafts else 1.0
            gate.stepped(
                price if is_first else seconds, 50 if gate.drafts else 64, 64,
                is_usual=not is_first,
            )  # fmt: skip
        gaps = [b - a for a, b in pairwise(steps) if b > a + 1]
        held.append(gaps[0])
    assert held[0] < 1.1 * 48 * 15 < 1.3 * held[0]
    # 2 % of the time between are some 40 s.
    assert held[1] == pytest.approx(40 / 0.02 / 0.7, rel=0.15)
    assert held[2] == pytest.approx(LONGEST_HOLD * 15, rel=0.05)
