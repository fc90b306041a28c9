"""A plain round of the gate is the pass that k = 0 runs: same width, no scores, same recording."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.modules.selector import Selector
from pillarattn.patch.captured_passes import CapturedPasses
from pillarattn.patch.target import HFTarget
from tests.decoding.cost_gate.simulated_machine import Always

NEW = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture
def patched(tiny_model):
    return pillarattn.patch(tiny_model("llama"))


@pytest.fixture
def passes(rehearsed, monkeypatch):
    """Return what each pass after the prompt was asked for, and how it ran."""
    seen = []
    forward, key, play = HFTarget.forward, CapturedPasses._key, CapturedPasses._play

    def asked(self, tokens, step):
        about = step.phase, tuple(tokens.shape), step.scores, step.scored_layers, step.row_limit
        seen.append(["asked", *about, bool(step.selections)])
        return forward(self, tokens, step)

    def recorded(self, inputs, step, width):
        found = key(self, inputs, step, width)
        seen.append(["recording", found])
        return found

    def ran(self, recording):
        seen.append(["ran", recording.width, recording.replay is None])
        play(self, recording)

    monkeypatch.setattr(HFTarget, "forward", asked)
    monkeypatch.setattr(CapturedPasses, "_key", recorded)
    monkeypatch.setattr(CapturedPasses, "_play", ran)
    return seen


def always_plain(monkeypatch):
    monkeypatch.setattr(SelfSpeculativeGenerator, "new_gate", lambda *_: Always(0, 0.05))
    return SelfSpeculativeGenerator(k="auto", s="auto", min_budget=4)


def passes_of(passes, model, ids, pillar):
    """Return the tokens and the passes of a call that goes on with the recordings of another."""
    model.generate(ids, **NEW, assistant=pillar)
    passes.clear()
    tokens = model.generate(ids, **NEW, assistant=pillar)
    return tokens, list(passes)


def test_the_gates_plain_rounds_are_the_passes_of_plain_decoding(
    passes, rehearsed, patched, prompt, monkeypatch
):
    ids = prompt(2, 30)
    expected, plain = passes_of(passes, patched, ids, SelfSpeculativeGenerator(k=0))
    tokens, gated = passes_of(passes, patched, ids, always_plain(monkeypatch))
    assert torch.equal(tokens, expected)
    assert gated == plain
    assert plain.count(["asked", Phase.VERIFY, (2, 1), None, frozenset(), None, False]) == 39
    assert {one[1] for one in plain if one[0] == "ran"} == {1}
    for one in rehearsed:
        assert one.reason is None
        assert one.replayed > 39


def test_a_call_that_decodes_plainly_selects_no_keys(passes, patched, prompt, monkeypatch):
    def selected(*_, **__):
        pytest.fail("keys were selected")

    for name in ("seed", "select"):
        monkeypatch.setattr(Selector, name, selected)
    patched.generate(prompt(2, 30), **NEW, assistant=always_plain(monkeypatch))


def test_a_call_that_drafts_at_once_reads_the_prompts_choice(passes, patched, prompt, monkeypatch):
    seed, seen = Selector.seed, []

    def seeded(*arguments, **options):
        seen.append(len(passes))
        return seed(*arguments, **options)

    monkeypatch.setattr(Selector, "seed", seeded)
    monkeypatch.setattr(SelfSpeculativeGenerator, "new_gate", lambda *_: Always(2, 0.05))
    pillar = SelfSpeculativeGenerator(k="auto", s="auto", min_budget=4)
    patched.generate(prompt(2, 30), **NEW, assistant=pillar)
    (begun,) = seen
    assert passes[begun][:3] == ["asked", Phase.DRAFT, (2, 1)]
    assert passes[begun][-1], "it reads selected keys"


def test_a_target_says_how_wide_its_passes_were(rehearsed, patched, prompt, monkeypatch):
    heard = []

    class Listening(Always):
        def observe(self, done):
            heard.append(done)

    monkeypatch.setattr(SelfSpeculativeGenerator, "new_gate", lambda *_: Listening(2, 0.05))
    pillar = SelfSpeculativeGenerator(k="auto", s="auto", min_budget=4)
    patched.generate(prompt(2, 30), **NEW, assistant=pillar)
    # Where the cache grows, some find no room for more than they need.
    widths = [one.width for one in heard]
    assert set(widths) == {9, 3}
    assert widths.count(9) > widths.count(3)
    assert not heard[0].is_settled
    assert any(one.is_settled for one in heard)
    heard.clear()
    eager = SelfSpeculativeGenerator(k="auto", s="auto", min_budget=4, cuda_graphs=False)
    patched.generate(prompt(2, 30), **NEW, assistant=eager)
    assert {(one.width, one.is_settled) for one in heard if one.k == 2} == {(3, True)}
