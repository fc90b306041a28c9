"""Losslessness while a gate switches at random, on a model in fp64 without transformers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.decoding.cost_gate import MAX_K, CostGate
from pillarattn.decoding.drafters import AssistantDrafter
from pillarattn.modules.strategies import STRATEGIES
from tests.decoding.cost_gate.scripted_gate import ScriptedGate

SMALL = {"s": 0.3, "min_budget": 3, "recent": 2, "sink": 1}
NEW = 130


@pytest.fixture(scope="module")
def lm(fakes):
    return fakes.AttentionLM()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def wanted(fakes, lm, prompt):
    return fakes.greedy_path(lm, prompt, NEW)


def gated(fakes, target, *, gate_seed=0, **options):
    run = fakes.build_run(
        target, new_tokens=NEW, gate=ScriptedGate(gate_seed), **{**SMALL, **options}
    )
    return run, run.run().sequences


@pytest.mark.parametrize("strategy", STRATEGIES.names())
def test_greedy_tokens_whatever_the_gate_does(fakes, lm, prompt, wanted, strategy):
    for seed in range(3):
        run, got = gated(
            fakes, fakes.AttentionTarget(lm, prompt), gate_seed=seed, strategy=strategy
        )
        assert got.equal(wanted)
        assert 0 < run.stats.plain_rounds < run.stats.rounds


@pytest.mark.parametrize("name", ["sparse", "ngram", "assistant", "ngram+sparse"])
def test_every_drafter(fakes, lm, prompt, wanted, name):
    small = fakes.AttentionLM(layers=1)

    def assistant():
        return AssistantDrafter(lambda: fakes.AttentionTarget(small, prompt))

    drafter = {"assistant": assistant, "ngram+sparse": lambda: ["ngram", "sparse"]}
    given = drafter.get(name, lambda: name)()
    for seed in range(3):
        target = fakes.AttentionTarget(lm, prompt)
        built = SelfSpeculativeGenerator(drafter=given).new_drafter()
        run, got = gated(fakes, target, gate_seed=seed, drafter=built)
        assert got.equal(wanted)
        assert run.stats.drafted > 0


@pytest.mark.parametrize("strategy", ["pillar", "h2o", "forecast", "quest"])
def test_seeded_samples_are_those_of_plain_decoding(fakes, lm, prompt, strategy):
    options = {"do_sample": True, "seed": 3, "strategy": strategy}
    plain = fakes.build_run(fakes.AttentionTarget(lm, prompt), k=0, new_tokens=NEW, **options)
    expected = plain.run().sequences
    for seed in range(3):
        _, got = gated(fakes, fakes.AttentionTarget(lm, prompt), gate_seed=seed, **options)
        assert got.equal(expected)


def test_plain_steps_score_nothing_and_old_selections_are_made_anew(fakes, lm, prompt):
    target = fakes.AttentionTarget(lm, prompt)
    run, _ = gated(fakes, target, gate_seed=2)
    plain = drafted = collected = 0
    for step in target.steps[1:]:
        if step.phase is Phase.DRAFT:
            drafted = 1
            continue
        scored = bool(step.scored_layers)
        plain += not drafted
        collected += scored and not drafted
        assert scored or not drafted
        drafted = 0
    # A plain step scores only where drafts are to begin again.
    switches = sum(one["k"] > 0 for one in run.stats.decisions)
    assert 0 < collected <= switches < plain


def test_the_gate_hears_of_every_round(fakes, lm, prompt):
    run, _ = gated(fakes, fakes.AttentionTarget(lm, prompt), gate_seed=4)
    seen = run.gate.seen
    emitted = sum(sum(done.accepted) + len(done.accepted) for done in seen)
    assert run.stats.emitted == 2 * (NEW - 1)
    # A row's last round may accept all that fits, and emit no token of its own.
    assert run.stats.emitted <= emitted <= run.stats.emitted + 2
    assert all(0 <= done.draft_seconds <= done.seconds for done in seen)
    assert all((done.draft_seconds > 0) == (done.k > 0) for done in seen)
    assert any(done.is_usual for done in seen if done.k)
    assert any(done.is_usual for done in seen if not done.k)
    assert run.stats.decisions
    assert {"round", "length", "k", "s", "reason"} <= set(run.stats.decisions[0])


class TickingClock:
    """Stands for a clock: every row of a pass costs a second, and a pass `base` seconds more."""

    def __init__(self, run, *, draft, base) -> None:
        self.run, self.draft, self.base = run, draft, base

    def start(self):
        pass

    def drafting(self):
        return nullcontext()

    def lap(self):
        k = self.run.asked
        draft = k * self.draft
        return draft + self.base + k + 1.0, draft


@pytest.mark.parametrize(
    ("draft", "base", "pays"), [(1.0, 100.0, True), (101.0, 100.0, False), (50.0, 0.0, False)]
)
def test_a_run_goes_where_time_is_saved(fakes, lm, prompt, draft, base, pays):
    """Drafts that read every key are always right: only their time decides."""
    wanted = fakes.greedy_path(lm, prompt, 200)
    target = fakes.AttentionTarget(lm, prompt)
    gate = CostGate(ss=(1.0,))
    run = fakes.build_run(target, k=MAX_K, new_tokens=200, gate=gate, s=1.0, min_budget=500)
    run.pace.clock = TickingClock(run, draft=draft, base=base)
    assert run.run().sequences.equal(wanted)
    assert run.stats.acceptance_rate == 1.0
    last = run.stats.decisions[-1]
    if pays:
        assert last["k"] >= 8
        assert last["tokens_per_second"] > 3 * last["plain_tokens_per_second"]
        assert run.stats.plain_rounds < 0.3 * run.stats.rounds
    else:
        assert last["k"] == 0
        assert run.stats.drafted <= 2 * 2 * 5
