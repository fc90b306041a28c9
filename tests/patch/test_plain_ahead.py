"""A plain pass that was begun before the host knew its tokens gives what one begun later does."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import pillarattn
from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.decoding.kept_run import KeptRun
from pillarattn.decoding.loop import DecodingRun
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.step import StepState
from pillarattn.patch.compat import cache_keyword
from pillarattn.patch.pass_ahead import PassAhead
from pillarattn.patch.target import HFTarget
from tests.decoding.cost_gate.simulated_machine import Always

NEW = 40


@pytest.fixture
def patched(tiny_model):
    return pillarattn.patch(tiny_model("llama"))


@pytest.fixture
def counts(rehearsed, monkeypatch):
    """Return how many passes were begun ahead, and how many of them were taken."""
    found = {"begun": 0, "taken": 0, "passes": 0}
    forward, ahead = HFTarget.forward, HFTarget.forward_ahead

    def asked(self, tokens, step):
        held = self._ahead
        logits = forward(self, tokens, step)
        found["passes"] += 1
        found["taken"] += held is not None and logits is held.logits
        return logits

    def begun(self, tokens, step):
        ahead(self, tokens, step)
        found["begun"] += self._ahead is not None

    monkeypatch.setattr(HFTarget, "forward", asked)
    monkeypatch.setattr(HFTarget, "forward_ahead", begun)
    return found


@pytest.fixture
def never(monkeypatch):
    """Return a function after which no pass is begun ahead."""
    return lambda: monkeypatch.setattr(HFTarget, "forward_ahead", lambda *_: None)


def tokens_of(model, ids, pillar, **options):
    """Return the tokens of a call that goes on with the recordings of others."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    for _ in range(3):
        torch.manual_seed(5)
        found = model.generate(ids, **options, assistant=pillar)
    return found


def test_all_passes_but_the_first_are_begun_ahead(counts, patched, prompt):
    ids = prompt(2, 30)
    expected = patched.generate(ids, max_new_tokens=NEW, do_sample=False)
    pillar = SelfSpeculativeGenerator(k=0)
    assert tokens_of(patched, ids, pillar).equal(expected)
    before = dict(counts)
    assert patched.generate(ids, max_new_tokens=NEW, do_sample=False, assistant=pillar).equal(
        expected
    )
    new = {name: value - before[name] for name, value in counts.items()}
    # The prompt gives the first token, the last one needs no pass, and at the lengths where a pass
    # was recorded its replay is not compared.
    assert new == {"passes": NEW - 1, "begun": NEW - 3, "taken": NEW - 3}


@pytest.mark.parametrize("kept", [True, False])
def test_a_call_ends_after_the_pass_that_nobody_took(rehearsed, patched, prompt, monkeypatch, kept):
    """Its buffers go to the next call, or back to the allocator, which may be in another stream."""
    ids, pillar = prompt(1, 30), SelfSpeculativeGenerator(k=0)
    eos = int(patched.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 60])
    options = {"do_sample": False, "eos_token_id": eos, "return_dict_in_generate": not kept}
    expected = tokens_of(patched, ids, pillar, **{**options, "return_dict_in_generate": False})
    ahead, events = HFTarget.forward_ahead, []

    def on_a_gpu(self, tokens, step):
        ahead(self, tokens, step)
        if self._ran_ahead is not None:
            self._ran_ahead = torch.device("cuda")
            events.append("begun")

    class Stream:
        def synchronize(self):
            events.append("waited")

    monkeypatch.setattr(HFTarget, "forward_ahead", on_a_gpu)
    keep = KeptRun.keep

    def noted(self, *arguments, **named):
        events.append("kept")
        keep(self, *arguments, **named)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(KeptRun, "keep", noted)
    found = patched.generate(ids, max_new_tokens=NEW, **options, assistant=pillar)
    assert expected.equal(found if kept else found.sequences)
    # Another thread may take at once what is kept.
    assert [one for one in events if one != "begun"] == ["waited", "kept"][: 1 + kept]
    assert events[-1] != "begun"
    assert events.count("begun") > 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 20},
    ],
    ids=["greedy", "sampled", "sampled, processed", "processed", "at least"],
)
@pytest.mark.parametrize("ends", [False, True], ids=["to the end", "rows that end"])
def test_tokens_are_those_of_passes_one_after_the_other(
    counts, never, patched, prompt, ragged, options, ends
):
    ids = prompt(3, 30)
    if ends:
        # Tokens that some rows reach, at different places.
        reached = patched.generate(ids, max_new_tokens=NEW, do_sample=False)
        options = {**options, "eos_token_id": [int(reached[0, 41]), int(reached[2, 52])]}
    ahead = tokens_of(patched, ids, SelfSpeculativeGenerator(k=0), **options)
    assert counts["taken"] > 30
    never()
    counts["taken"] = 0
    assert ahead.equal(tokens_of(patched, ids, SelfSpeculativeGenerator(k=0), **options))
    assert counts["taken"] == 0


def test_ragged_prompts(counts, never, patched, ragged):
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = patched.generate(**ragged, **options)
    pillar = SelfSpeculativeGenerator(k=0)
    for _ in range(3):
        assert patched.generate(**ragged, **options, assistant=pillar).equal(expected)
    assert counts["taken"] > 30


def test_scores_of_rows_that_have_ended_are_those_of_padding(counts, patched, prompt):
    """Plain decoding goes on with padding there, and so must what it is compared with."""
    ids = prompt(3, 30)
    reached = patched.generate(ids, max_new_tokens=NEW, do_sample=False)
    options = {
        "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0,
        "eos_token_id": int(reached[0, 45]), "return_dict_in_generate": True,
        "output_scores": True,
    }  # fmt: skip
    expected = patched.generate(ids, **options)
    pillar = SelfSpeculativeGenerator(k=0)
    for _ in range(3):
        found = patched.generate(ids, **options, assistant=pillar)
    assert found.sequences.equal(expected.sequences)
    assert len(found.scores) == len(expected.scores)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert counts["taken"] > 10


def test_a_text_that_ends_leaves_the_cache_as_it_was(counts, patched, prompt):
    """The pass that was begun for what comes after the end is of use to nobody."""
    ids = prompt(1, 30)
    reached = patched.generate(ids, max_new_tokens=NEW, do_sample=False)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": int(reached[0, 60])}
    expected = patched.generate(ids, **options)
    pillar, taken = SelfSpeculativeGenerator(k=0), 0
    cache, keyword = pillarattn.PillarCache(limit=100), cache_keyword()
    for _ in range(3):
        cache.reset()
        taken = counts["taken"]
        found = patched.generate(ids, **options, assistant=pillar, **{keyword: cache})
        assert found.equal(expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
    more = torch.cat([found, prompt(1, 4)], dim=1)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert patched.generate(more, **options, assistant=pillar, **{keyword: cache}).equal(
        patched.generate(more, **options)
    )
    assert counts["taken"] > taken + 10


def test_an_impossible_token_is_reported_as_before(counts, patched, prompt):
    """It is no index of an embedding: a pass over it would end the process on a GPU."""

    class Forbid(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores if input_ids.shape[1] < 50 else torch.full_like(scores, -torch.inf)

    pillar, processors = SelfSpeculativeGenerator(k=0, seed=1), LogitsProcessorList([Forbid()])
    ids = prompt(1, 30)
    tokens_of(patched, ids, pillar, do_sample=True)
    # A pass that fails is run again, with a warning: there must be none.
    warnings.simplefilter("error", RuntimeWarning)
    with pytest.raises(ValueError, match="no possible token"):
        patched.generate(
            ids, max_new_tokens=NEW, do_sample=True, assistant=pillar, logits_processor=processors
        )


class Turns(Always):
    """Plain rounds and drafts in turns of a few rounds."""

    def __init__(self, *turns):
        super().__init__(0, 0.05)
        self.turns = list(turns)
        self.at = 0

    def choose(self, length, room):
        choice = super().choose(length, room)
        k, rounds = self.turns[self.at % len(self.turns)]
        self.at += 1
        return replace(choice, k=k, rounds=rounds)


def test_a_gate_that_knows_the_next_round_begins_it_ahead(counts, patched, prompt, monkeypatch):
    ids = prompt(2, 30)
    expected = patched.generate(ids, max_new_tokens=NEW, do_sample=False)
    monkeypatch.setattr(
        SelfSpeculativeGenerator, "new_gate", lambda *_: Turns((0, 4), (2, 2), (0, 1), (3, 1))
    )
    pillar = SelfSpeculativeGenerator(k="auto", s="auto", min_budget=4)
    for _ in range(4):
        found = patched.generate(ids, max_new_tokens=NEW, do_sample=False, assistant=pillar)
        assert found.equal(expected)
    assert counts["begun"] > 5
    # None in vain: what the gate has not said yet is not guessed.
    assert counts["begun"] == counts["taken"]


class OneText(LogitsProcessor):
    """No token at a length where the scores are those of one text's own pass."""

    def __init__(self, sequence, scores):
        self.sequence, self.best = sequence, float(scores.max())

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != len(self.sequence):
            return scores
        mine = (input_ids == self.sequence).all(dim=1)
        own = mine & (scores.max(dim=-1).values - self.best).abs().lt(1e-2)
        return scores.masked_fill(own[:, None], -torch.inf)


def test_a_row_that_waits_for_others_runs_its_own_pass_again(counts, patched, prompt, monkeypatch):
    """It is ahead of them and has no possible token: it emits nothing until they are there."""
    ids = prompt(2, 30, seed=4)
    monkeypatch.setattr(SelfSpeculativeGenerator, "new_gate", lambda *_: Turns((4, 6), (0, 60)))
    pillar = SelfSpeculativeGenerator(k="auto", s="auto", min_budget=30, seed=3)
    lengths, accept = [], DecodingRun.accept

    def watched(self, *arguments):
        accept(self, *arguments)
        lengths.append(list(self.history.lengths))

    monkeypatch.setattr(DecodingRun, "accept", watched)
    call = {
        "max_new_tokens": 60, "do_sample": True, "pad_token_id": 0, "assistant": pillar,
        "temperature": 0.5,
    }  # fmt: skip
    for _ in range(4):
        lengths.clear()
        found = patched.generate(ids, **call, return_dict_in_generate=True, output_logits=True)
    plain = lengths[7]
    row = plain.index(max(plain))
    assert plain[row] > plain[1 - row], "rows must be at different places here"
    end = plain[row] + 2
    only = OneText(found.sequences[row, :end], found.logits[end - 30][row])
    with pytest.raises(ValueError, match=f"row {row} has no possible token after {end}"):
        patched.generate(ids, **call, logits_processor=LogitsProcessorList([only]))


def test_nothing_is_begun_ahead_of_drafts_or_for_a_measured_run(counts, patched, prompt):
    ids = prompt(2, 30)
    tokens_of(patched, ids, SelfSpeculativeGenerator(k=3, min_budget=4))
    measured = SelfSpeculativeGenerator(k=0)
    measured.synchronise = True
    tokens_of(patched, ids, measured)
    assert counts["begun"] == 0


def test_which_passes_it_serves():
    ahead = PassAhead(torch.zeros(2, 1, 5), StepState(Phase.VERIFY))
    one, two = torch.zeros(2, 1), torch.zeros(2, 2)
    assert ahead.serves(one, StepState(Phase.VERIFY))
    assert not ahead.serves(two, StepState(Phase.VERIFY))
    assert not ahead.serves(one, StepState(Phase.DRAFT))
    assert not ahead.serves(one, StepState(Phase.VERIFY, scores=ScoreBuffer()))
    assert not ahead.serves(one, StepState(Phase.VERIFY, row_limit=32))


def test_a_pass_of_another_kind_forgets_what_was_begun(counts, patched, prompt, monkeypatch):
    ids = prompt(2, 30)
    expected = patched.generate(ids, max_new_tokens=NEW, do_sample=False)
    forward = HFTarget.forward

    def limited(self, tokens, step):
        return forward(self, tokens, StepState(step.phase, row_limit=64))

    pillar = SelfSpeculativeGenerator(k=0)
    tokens_of(patched, ids, pillar)
    monkeypatch.setattr(HFTarget, "forward", limited)
    before = counts["begun"], counts["taken"]
    found = patched.generate(ids, max_new_tokens=NEW, do_sample=False, assistant=pillar)
    assert found.equal(expected)
    assert counts["begun"] > before[0]
    assert counts["taken"] == before[1]
