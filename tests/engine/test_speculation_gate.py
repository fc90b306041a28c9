"""The engine's gate finds the faster way, keeps it while it is that, and does not cost much."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pillarattn.config import PillarConfig
from pillarattn.engine import mixed_step, speculation_gate
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.cuda_graph import GraphedPasses
from pillarattn.engine.request import SamplingParams
from pillarattn.engine.speculation_gate import SpeculationGate


def share_of_best(gate, steps, seconds, *, requests=64, per_step=None):
    """Run a gate and return what it lost: time of the better way for the tokens / time that passed.

    Args:
        gate: made.
        steps: how many.
        seconds: of a step with and without drafts, by whether it drafts; or a function of the step.
        requests: that run.
        per_step: tokens of a step, likewise.
    """
    per_step = per_step or {True: 50, False: 64}
    spent = tokens = 0.0
    for step in range(steps):
        cost = seconds(step) if callable(seconds) else seconds
        spent += cost[gate.drafts]
        tokens += per_step[gate.drafts]
        gate.stepped(cost[gate.drafts], per_step[gate.drafts], requests)
    best = min(cost[way] / per_step[way] for way in (True, False))
    return tokens * best / spent


@pytest.mark.parametrize("drafting", [0.4, 0.75, 1.0, 1.3, 2.5])
def test_it_ends_near_the_better_way(drafting):
    """At most 3 % are lost over 4,000 steps, however bad the other way is."""
    gate = SpeculationGate(8)
    seconds = {True: 50 / 64 / drafting, False: 1.0}
    assert share_of_best(gate, 4000, seconds) > 0.97
    if abs(drafting - 1) > 0.1:
        assert gate.drafts == (drafting > 1)
    assert gate.trials >= 2


def test_it_follows_a_change():
    """Contexts grow: drafts lose at first and win later."""
    gate = SpeculationGate(4)
    share_of_best(gate, 2000, {True: 1.2, False: 1.0})
    assert not gate.drafts
    share_of_best(gate, 20000, {True: 0.5, False: 1.0})
    assert gate.drafts


def test_another_batch_is_measured_anew():
    gate = SpeculationGate(4)
    share_of_best(gate, 2000, {True: 1.2, False: 1.0})
    trials = gate.trials
    share_of_best(gate, 100, {True: 0.5, False: 1.0}, requests=8)
    assert gate.trials > trials
    assert gate.drafts


def test_a_step_that_records_something_does_not_count():
    gate = SpeculationGate(4)

    def seconds(step):
        return {True: 0.6 if step % 20 else 30.0, False: 1.0}

    for step in range(2000):
        cost = seconds(step)[gate.drafts]
        gate.stepped(cost, 50 if gate.drafts else 64, 64)
    assert gate.drafts


def test_passes_are_usual_once_they_are_replayed_alone(monkeypatch):
    """Not the first of a kind, nor those that record or compare it; after a growth again."""

    def record(self, held, play):
        held.logits = play()
        held.replay = lambda: None

    monkeypatch.setattr(GraphedPasses, "_record", record)
    graphs, usual = GraphedPasses(is_on=True, device=torch.device("cpu")), []
    runs = [("a", 0, 2)] * 5 + [("b", 0, None)] * 4 + [("a", 0, 2)] + [("a", 1, 2)] * 3
    for kind, generation, live in runs:
        graphs.run(kind, generation, lambda: torch.ones(3, 4), live=live)
        usual.append(graphs.is_usual)
    assert usual == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3 + [False] * 2 + [True]
    # What asks for no recording is what it says.
    for is_usual in (True, False):
        graphs.begin(is_usual=is_usual)
        assert graphs.is_usual == is_usual
    # Where nothing is recorded, that is usual.
    assert GraphedPasses(is_on=False, device=torch.device("cpu")).is_usual
    graphs.reason = "a test says so"
    assert graphs.is_usual


@pytest.mark.parametrize(("delay", "temperature"), [(False, 0.9), (True, 0.0)])
def test_tokens_do_not_depend_on_the_gate(
    engine, delayed, prompts, monkeypatch, delay, temperature
):
    """It opens and closes in the middle of rounds."""
    monkeypatch.setattr(speculation_gate, "ROUNDS", 1)
    monkeypatch.setattr(speculation_gate, "SETTLING", 0)
    monkeypatch.setattr(speculation_gate, "HOLD", 1)
    monkeypatch.setattr(speculation_gate, "LOSS", 1e9)
    params = [SamplingParams(max_tokens=36, temperature=temperature, seed=i) for i in range(6)]
    make = delayed if delay else engine
    wanted = make(prefix_cache=False).generate(prompts, params)
    run, ways = make(prefix_cache=False, speculative="auto"), set()
    stepped, forward, scored = run._gate.stepped, run.runner.run, {True: 0, False: 0}

    def launched(segments, *others):
        scored[run.speculates] += sum(s.scores is not None for s in segments)
        return forward(segments, *others)

    def watched(seconds, tokens, requests, **named):
        if not requests:
            return
        assert named == {"is_usual": True, "cruises": False}
        ways.add(run.speculates)
        # Nobody would do anything but idle.
        assert run.speculates or not run._flights
        # Either way is the better one by turns.
        stepped(1.0 + (run._gate.trials % 2 == run.speculates), tokens, requests, **named)

    monkeypatch.setattr(run._gate, "stepped", watched)
    monkeypatch.setattr(run.runner, "run", launched)
    outputs = run.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert all(o.error is None for o in outputs)
    assert ways == {True, False}
    assert run._gate.trials > 3
    assert scored[True] > 0 == scored[False]
    assert 0 < run.stats.drafted < sum(o.drafted for o in wanted)
    assert run.stats.rounds > sum(o.rounds for o in wanted)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_turns_engines_that_cruise(cruising, engine, prompts, monkeypatch, temperature):
    """Either way goes on without plans, and the tokens are the same."""
    monkeypatch.setattr(speculation_gate, "ROUNDS", 2)
    monkeypatch.setattr(speculation_gate, "SETTLING", 1)
    monkeypatch.setattr(speculation_gate, "HOLD", 2)
    params = [SamplingParams(max_tokens=90, temperature=temperature, seed=i) for i in range(6)]
    wanted = engine(delayed_verification=False).generate(prompts, params)
    run, drafted, ks, on = cruising(speculative="auto", kv_tokens=2048), [], set(), []
    stepped = run._gate.stepped

    def watched(seconds, tokens, requests, *, is_usual, cruises):
        if not requests:
            return
        # Nothing is recorded here.
        assert is_usual and cruises == run.cruise.is_on
        on.append(cruises)
        if on[-1]:
            ks.add(run.cruise.rounds.k)
            drafted.append(len(run.last_plan.drafts))
            assert bool(run.cruise.rounds.k) or not drafted[-1]
        # Either way is the better one by turns.
        stepped(
            1.0 + (run._gate.trials % 2 == run.speculates), tokens, requests,
            is_usual=is_usual, cruises=cruises,
        )  # fmt: skip

    monkeypatch.setattr(run._gate, "stepped", watched)
    outputs = run.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert ks == {0, 4} and sum(drafted) > 0
    assert run._gate.trials > 1
    # No plan stands between the two.
    assert all(on[on.index(True) : -2])
    assert run.cruised > 30
    run.scheduler.check()
    assert run.scheduler.pool.free == run.scheduler.pool.num_blocks


class Turned:
    """A gate that a test turns."""

    drafts = True

    def stepped(self, seconds, tokens, requests, *, is_usual, cruises):
        pass


@pytest.fixture
def turned(cruising):
    """Return `turned(**changes)`: an engine that cruises, and its gate."""

    def build(**changes):
        run, gate = cruising(speculative="auto", **changes), Turned()
        run._gate = run._intake._gate = run.cruise._gate = gate
        return run, gate

    return build


def test_without_drafts_texts_outgrow_the_room_for_scores(turned, prompts, alone):
    """Nobody leaves any: plans need not come back, as nothing of theirs makes that room."""
    run, gate = turned(kv_tokens=2048)
    names = [run.add_request(p, SamplingParams(max_tokens=150)) for p in prompts[:3]]
    while not run.cruise.is_on:
        run.step()
    gate.drafts, on, done = False, [], {}
    buffers = run.runner.buffers
    buffers.sizes = replace(buffers.sizes, span=64)
    while len(run.requests) == 3:
        done |= {o.request_id: o for o in run.step() if o.finished}
        on.append(run.cruise.is_on)
    assert max(len(d.text.tokens(0, d.length)) for d in run._decoders.values()) > 100
    assert all(on)
    while run.has_unfinished:
        done |= {o.request_id: o for o in run.step() if o.finished}
    assert [done[n].token_ids for n in names] == [alone(p, 150) for p in prompts[:3]]


def tails(monkeypatch):
    """Return where lists of drafts are noted: the newest chosen key, and where the tail begins."""
    seen, attend = [], mixed_step.mixed_attention

    def watched(*arguments, **given):
        counts, starts = given["counts"], given["row_starts"].diff()
        for seat in ((counts[:, 0] > 0) & (starts > 0)).nonzero().flatten().tolist():
            newest = [int(line[: counts[seat, 0]].max()) for line in given["indices"][seat]]
            seen.append((max(newest), int(given["tail_start"][seat]), int(given["lengths"][seat])))
        return attend(*arguments, **given)

    monkeypatch.setattr(mixed_step, "mixed_attention", watched)
    return seen


@pytest.mark.parametrize("planned", [False, True])
def test_drafts_read_on_where_old_keys_end(turned, prompts, monkeypatch, planned):
    """After steps without drafts a tail begins where the keys of long ago end, not at the round.

    Recent keys are always chosen: the newest one is next to the tail.
    """
    run, gate = turned(kv_tokens=2048)
    for prompt in prompts[:3]:
        run.add_request(prompt, SamplingParams(max_tokens=120))
    while not run.cruise.is_on:
        run.step()
    gate.drafts = False
    for _ in range(20):
        run.step()
    gate.drafts, seen = True, tails(monkeypatch)
    run.step()
    assert run.cruise.is_on
    if planned:
        run.cruise.leave()
        run.cruise = None
    for _ in range(3):
        run.step()
    assert any(length - tail > 15 for _, tail, length in seen)
    assert all(newest == tail - 1 for newest, tail, _ in seen)


def test_what_it_cannot_gate_is_named():
    with pytest.raises(ValueError, match="speculative must be True, False or 'auto', got 'yes'"):
        EngineConfig(speculative="yes")
    pillar = PillarConfig(strategy="h2o")
    with pytest.raises(ValueError, match="takes strategies without history, got 'h2o'"):
        EngineConfig(speculative="auto", pillar=pillar)
