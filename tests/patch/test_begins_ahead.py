"""Which plain passes begin before the host knows their tokens: those that are replayed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

import pillarattn
from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.decoding.loop import DecodingRun
from pillarattn.decoding.round_end import RoundEnd
from pillarattn.errors import UnsupportedModelError
from pillarattn.modules.step import StepState
from pillarattn.patch.target import HFTarget


@contextmanager
def changed(owner, name, value):
    """Give an object another attribute inside the block."""
    had = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, had)


@contextmanager
def states_to_roll_back(target):
    """Those of recurrent layers, which no length cuts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target.cache), "state_layers", property(lambda _: [object()]))
        yield


HINDRANCES = {
    "rows advance together": lambda t: changed(t, "lockstep", True),
    "states to roll back": states_to_roll_back,
    # A draft head wants hidden states of each pass, which no replay hands out.
    "watched": lambda t: changed(t, "_tap", object()),
    # The model counts positions by itself: they would be recorded.
    "no positions": lambda t: changed(t, "_next_position", None),
    # One rank that replays and one that does not would run different numbers of passes.
    "ranks of one model": lambda t: changed(t, "begins_ahead", False),
    "no recordings": lambda t: changed(t, "_captured", None),
    "nothing compared": lambda t: changed(t._captured, "proven", set()),
    "another kind compared": lambda t: changed(
        t._captured, "proven", {(Phase.DRAFT, 1), (Phase.VERIFY, 5)}
    ),
    "not recorded": lambda t: changed(plain_recording(t), "replay", None),
    # The replay there is not compared, and tells nothing of other lengths.
    "where it was recorded": lambda t: changed(plain_recording(t), "first", t.cache.lengths.host),
    "no room": lambda t: changed(t._captured, "_capacity", t.cache.lengths.max),
    "given up": lambda t: changed(t._captured, "reason", "another length has other logits"),
}


def plain_recording(target):
    (held,) = (one for one in target._captured._kept.values() if one.width == 1)
    return held


@pytest.mark.parametrize("hindrance", HINDRANCES.values(), ids=HINDRANCES.keys())
def test_what_is_not_replayed_as_it_is_begins_later(
    rehearsed, tiny_model, prompt, monkeypatch, hindrance
):
    patched, ids = pillarattn.patch(tiny_model("llama")), prompt(2, 30)
    pillar, begun, asked = SelfSpeculativeGenerator(k=0), HFTarget.forward_ahead, []

    def hindered(self, tokens, step):
        lengths = self.cache.lengths.host
        with hindrance(self):
            begun(self, tokens, step)
        asked.append(self._ahead is None)
        # It leaves nothing behind, and goes on where it is not hindered.
        assert self.cache.lengths.host == lengths
        begun(self, tokens, step)
        asked.append(self._ahead is not None)

    options = {"max_new_tokens": 12, "do_sample": False, "assistant": pillar}
    for _ in range(2):
        expected = patched.generate(ids, **options)
    monkeypatch.setattr(HFTarget, "forward_ahead", hindered)
    assert patched.generate(ids, **options).equal(expected)
    # Each round but the last; where one was recorded before, neither way begins.
    assert len(asked) >= 20
    assert asked[0::2] == [True] * (len(asked) // 2)
    assert sum(asked[1::2]) >= 8


def test_a_pass_begun_ahead_tells_which_layers_attended(rehearsed, tiny_model, prompt, monkeypatch):
    patched, ids = pillarattn.patch(tiny_model("llama")), prompt(2, 30)
    pillar, begun, seen = SelfSpeculativeGenerator(k=0), HFTarget.forward_ahead, []
    forward = HFTarget.forward

    def noted(self, tokens, step):
        is_ahead, self.block_width = self._ahead is not None, 7
        logits = forward(self, tokens, step)
        if is_ahead:
            seen.append((list(step.visited), self.block_width))
        return logits

    def misled(self, tokens, step):
        begun(self, tokens, step)
        if self._ahead is not None:
            self._ahead.step.visited[:] = [0]

    options = {"max_new_tokens": 12, "do_sample": False, "assistant": pillar}
    monkeypatch.setattr(HFTarget, "forward", noted)
    for _ in range(3):
        patched.generate(ids, **options)
    layers = list(range(patched.config.num_hidden_layers))
    assert len(seen) > 8
    assert all(one == (layers, 1) for one in seen)
    monkeypatch.setattr(HFTarget, "forward_ahead", misled)
    with pytest.raises(UnsupportedModelError, match="attends outside the library"):
        patched.generate(ids, **options)


def test_strict_passes_are_compared_by_themselves(rehearsed, tiny_model, prompt, monkeypatch):
    """What the usual passes have proven says nothing of strict ones."""
    patched, ids = pillarattn.patch(tiny_model("llama")), prompt(1, 30)
    pillar, begun, found = SelfSpeculativeGenerator(k=0), HFTarget.forward_ahead, []

    def noted(self, tokens, step):
        inputs = self._inputs(tokens.unsqueeze(1), 1)
        usual = self._captured.will_replay(inputs, StepState(Phase.VERIFY), 1)
        with changed(self._captured, "strict", True):
            strictly = self._captured.will_replay(inputs, StepState(Phase.VERIFY), 1)
            with changed(self._captured, "proven", {(Phase.VERIFY, 1, "strict")}):
                proven = self._captured.will_replay(inputs, StepState(Phase.VERIFY), 1)
        found.append((usual, strictly, proven))
        begun(self, tokens, step)

    options = {"max_new_tokens": 12, "do_sample": False, "assistant": pillar}
    for _ in range(2):
        patched.generate(ids, **options)
    monkeypatch.setattr(HFTarget, "forward_ahead", noted)
    patched.generate(ids, **options)
    assert found.count((True, False, True)) > 8


def test_a_row_that_is_cut_back_runs_another_pass(rehearsed, tiny_model, prompt, monkeypatch):
    """A criterion of the whole batch may end a row behind the pass that was begun for it."""
    patched, ids = pillarattn.patch(tiny_model("llama")), prompt(2, 30)
    pillar, cut, held = SelfSpeculativeGenerator(k=0), RoundEnd.cut, []
    accept = DecodingRun.accept

    def cut_back(self, before, base):
        cut(self, before, base)
        if before[0] == 36:
            self.emitted[0] = 0

    def noted(self, *arguments):
        accept(self, *arguments)
        held.append((self.history.lengths[0], self.target._ahead is not None))

    options = {"max_new_tokens": 12, "do_sample": False, "assistant": pillar}
    for _ in range(2):
        expected = patched.generate(ids, **options)
    monkeypatch.setattr(DecodingRun, "accept", noted)
    monkeypatch.setattr(RoundEnd, "cut", cut_back)
    assert patched.generate(ids, **options).equal(expected)
    found = dict(held)
    assert found[36] and not found[37] and found[38]
