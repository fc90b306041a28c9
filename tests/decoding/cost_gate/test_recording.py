"""The gate where passes are recorded: what the first ones cost is paid once, and tells nothing."""

from __future__ import annotations

import copy

import pytest

from pillarattn.decoding.cost_gate import FIRST_S, Choice, CostGate, GateMemory, ObservedRound, Pace
from pillarattn.decoding.cost_gate.gate import MOST_REPEATS, SHORT_ROOM, WARM_ROUNDS
from pillarattn.decoding.cost_gate.pace import MOST_UNSETTLED
from pillarattn.decoding.cost_gate.trials import FIRST_WAIT, LAST_WAIT, Trials
from tests.decoding.cost_gate.recording_machine import RecordingMachine, SimulatedClock, call
from tests.decoding.cost_gate.simulated_machine import Always

KS = (0, 4, 8, 12, 16)


class Model:
    """Somebody whom a memory remembers."""


def large_batch(**changes):
    """Sixty-four rows of a small model: a round of eight drafts takes 25 ms for seven tokens."""
    return RecordingMachine(6.07e-3, 1.0e-3, 17.05e-3, 0.9416, **changes)


def one_row(**changes):
    """One row of a large model: a round of eight drafts takes 54 ms for seven tokens."""
    return RecordingMachine(6.93e-3, 5.3e-3, 12e-3, 0.9416, **changes)


def calls_of(machine, number, *, seed=0, **options):
    """Return calls through gates that know what the ones before have learnt, and the last gate."""
    memory, model, played = GateMemory(), Model(), []
    for turn in range(number):
        gate = CostGate(known=memory.recall(model, "kind"))
        played.append(call(machine, gate, seed=100 * seed + turn, **options))
        memory.keep(model, "kind", gate.outlook)
    return played, gate


def settled_seconds(machine, k, *, seed, **options):
    """Return what a fixed k takes once all is recorded."""
    machine = copy.deepcopy(machine)
    for _ in range(2):
        played = call(machine, Always(k, 0.05), seed=seed, **options)
    return played.seconds


def test_the_third_call_of_a_large_batch_is_as_fast_as_the_best_setting():
    """In the mean: which setting is the best of one call is luck, as its last row ends it."""
    options = {"batch": 64, "tokens": 256}
    seconds, reached = dict.fromkeys(KS, 0.0), 0.0
    for seed in range(8):
        machine = large_batch()
        (first, second, third), _ = calls_of(machine, 3, seed=seed, **options)
        for k in KS:
            seconds[k] += settled_seconds(machine, k, seed=100 * seed + 2, **options)
        reached += third.seconds
        # Nothing is paid for drafts that the call may be too short to earn, until there is another.
        assert not any(first.drafted)
        assert (first.unsettled, second.unsettled, third.unsettled) == (3, 3, 0)
        assert max(second.drafted) >= 8
    plain = seconds.pop(0)
    assert min(seconds.values()) < 0.7 * plain
    assert reached <= min(seconds.values()) / 0.95


@pytest.mark.parametrize("tokens", [256, 512])
@pytest.mark.parametrize("seed", range(4))
def test_where_drafts_never_pay_they_are_paid_for_once(seed, tokens):
    machine = one_row()
    played, _ = calls_of(machine, 4, seed=seed, tokens=tokens)
    learnt = 1 if tokens > SHORT_ROOM else 2
    assert sum(one.unsettled for one in played[learnt:]) == 0
    for turn in range(learnt, 4):
        plain = settled_seconds(machine, 0, seed=100 * seed + turn, tokens=tokens)
        assert played[turn].seconds <= plain / 0.97


@pytest.mark.parametrize("seed", range(4))
def test_shares_whose_selections_are_compiled_first_are_not_tried_for_nothing(seed):
    """A selection of another size is another kernel: half a second where a step takes 7 ms."""
    machine = one_row(compiles=0.9)
    (*_, last), _ = calls_of(machine, 6, seed=seed, tokens=512)
    plain = settled_seconds(machine, 0, seed=seed, tokens=512)
    assert last.seconds <= plain / 0.97
    assert machine.shares == {FIRST_S}


def test_a_long_first_call_learns():
    machine = large_batch()
    (first,), gate = calls_of(machine, 1, batch=64, tokens=2000)
    assert max(first.drafted) >= 8
    assert sum(k == 0 for k in first.drafted) < 20
    assert gate.outlook.costs.rest_seconds(8, 7680) == pytest.approx(17.05e-3, rel=0.05)
    assert gate.outlook.costs.plain.at(7680) == pytest.approx(6.07e-3, rel=0.05)


def test_rounds_that_are_not_settled_set_no_costs_and_use_up_no_allowance():
    (played,), gate = calls_of(one_row(noise=0.0), 1, tokens=400)
    assert played.unsettled == 6
    assert gate.outlook.settles
    assert gate.outlook.costs.plain.at(7680) == pytest.approx(6.93e-3)
    assert gate.outlook.costs.draft_seconds(0.05, 7680) == pytest.approx(5.3e-3)
    assert gate.lost_seconds <= (0.012 * 400 + 2 * 3) * 6.93e-3
    assert gate.outlook.trials.invested == 0.0


def test_a_call_that_ends_amid_its_first_trial_leaves_the_rest_to_the_next():
    """The second has room for two rounds that draft, neither of which is settled."""
    machine = large_batch()
    played, gate = calls_of(machine, 2, batch=64, tokens=64 + 3)
    assert 0 < sum(map(bool, played[1].drafted)) < WARM_ROUNDS + 3
    assert gate.outlook.costs.rounds < WARM_ROUNDS
    after = CostGate(known=copy.deepcopy(gate.outlook))
    third = call(machine, after, batch=64, tokens=256, seed=2)
    assert max(third.drafted) >= 8


def test_drafts_that_are_never_recorded_are_taken_as_they_are():
    machine = large_batch(settles=False)
    played, gate = calls_of(machine, 3, batch=64, tokens=300)
    assert sum(map(bool, played[0].drafted)) <= MOST_UNSETTLED + WARM_ROUNDS
    assert gate.outlook.costs.draft_seconds(0.05, 7680) == pytest.approx(30e-3, rel=0.1)
    assert not any(played[1].drafted)
    assert not any(played[2].drafted)


@pytest.mark.parametrize("told_after", [1, 2, 100])
def test_a_trial_whose_passes_all_have_a_new_shape_goes_on_until_it_tells(told_after):
    _, gate = calls_of(one_row(), 2, tokens=512)
    gate = CostGate(known=gate.outlook)
    trials = gate.outlook.trials
    trials.wait, length = 0, trials.told_at
    trial = gate.choose(length, 400)
    assert trial.reason == "probe"
    slow = min(told_after, 1 + MOST_REPEATS)
    for turn in range(min(told_after, MOST_REPEATS) + 1):
        told, lost = gate.outlook.costs.rounds, gate.lost_seconds
        settled = turn == told_after
        gate.observe(
            ObservedRound(trial.k, trial.s, length, 0.3, 0.6, [0], is_settled=settled, width=17)
        )
        assert gate.outlook.costs.rounds == told + settled
        assert (gate.lost_seconds > lost) == settled
        after = gate.choose(length, 400)
        if turn < min(told_after, MOST_REPEATS):
            assert (after.k, after.s, after.rounds) == (trial.k, trial.s, 1)
    assert after.k == 0
    assert trials.invested == pytest.approx(slow * (0.6 - 6.93e-3), rel=0.01)


def test_drafts_are_not_tried_where_recording_them_would_cost_more_than_they_may():
    """Verify passes have another shape every 512 tokens; trials stay where they have one."""
    machine = one_row(span=512)
    played, gate = calls_of(machine, 3, tokens=4096)
    for turn in (1, 2):
        plain = settled_seconds(machine, 0, seed=turn, tokens=4096)
        assert played[turn].seconds <= plain / 0.97
        assert 0 < sum(map(bool, played[turn].drafted)) < 20
    assert gate.outlook.trials.invested <= 0.01 * gate.outlook.trials.elapsed


def test_drafts_that_pay_are_recorded_wherever_the_context_leads():
    machine = large_batch(span=512)
    played, _ = calls_of(machine, 2, batch=64, tokens=4096)
    for one in played:
        assert sum(k == 0 for k in one.drafted) < 60
    assert played[0].unsettled > 10


def test_a_pace_says_which_rounds_were_settled_and_how_wide():
    seen = []

    class Listening(Always):
        def observe(self, done):
            seen.append(done)

    pace = Pace(Listening(2, 0.5), SimulatedClock(), selects_keys=True, needs_scores=True, s=0.5)
    pace.begin(lambda: (100, 50), seeded=True)
    for settled in (False, True, *[False] * (MOST_UNSETTLED + 2)):
        pace.finish_round(2, 100, [1], settled=settled, width=17)
    assert [one.is_settled for one in seen] == [
        False, True, *[False] * MOST_UNSETTLED, True, True
    ]  # fmt: skip
    pace.finish_round(0, 100, [0], settled=False, width=1)
    assert not seen[-1].is_settled
    assert [one.width for one in seen[-2:]] == [17, 1]


def test_the_gate_asks_nothing_between_two_choices_to_decode_plainly():
    pace = Pace(Always(0, 0.5), SimulatedClock(), selects_keys=True, needs_scores=True, s=0.5)
    pace.begin(lambda: (100, 500), seeded=False)
    for _ in range(60):
        assert not pace.advance(lambda: pytest.fail("asked"), scored=False)
        assert pace.k == 0
        assert not pace.collects


@pytest.mark.parametrize("first", [0, 2])
def test_keys_of_the_prompt_serve_drafts_that_begin_at_once(first):
    """After a plain round others are chosen: those would be older than what was written since."""
    choices = iter([Choice(first, 0.5, 1, "probe"), Choice(2, 0.5, 4, "probe")])
    gate = Always(0, 0.5)
    gate.choose = lambda length, room: next(choices)
    pace = Pace(gate, SimulatedClock(), selects_keys=True, needs_scores=True, s=0.5)
    assert not pace.begin(lambda: (100, 500), seeded=True)
    assert pace.k == first
    assert not pace.advance(lambda: (101, 499), scored=False)
    assert (pace.k, pace.collects) == ((2, True) if first else (0, True))
    assert pace.advance(lambda: (102, 498), scored=True)
    assert pace.k == 2


def test_trials_that_fail_grow_rare_through_later_calls():
    played, gate = calls_of(one_row(), 14, tokens=256)
    tried = [any(one.drafted) for one in played]
    assert tried[1]
    assert sum(tried[8:]) <= 2
    assert gate.outlook.trials.wait >= 512


def test_a_trial_is_due_after_a_wait_or_at_a_longer_context():
    trials = Trials()
    trials.begin(1000, goes_on=False)
    for wait in (64, 128, 256, 512, LAST_WAIT, LAST_WAIT):
        trials.plain_since = trials.wait
        assert trials.is_due(1000)
        trials.begin(1000, goes_on=True)
        assert not trials.is_due(1100)
        trials.begin(1000, goes_on=False)
        assert trials.wait == wait
    assert trials.is_due(1200)
    trials.begin(1200, goes_on=False)
    assert trials.wait == FIRST_WAIT
    trials.begin(1200, goes_on=False)
    trials.succeed()
    assert trials.wait == FIRST_WAIT
