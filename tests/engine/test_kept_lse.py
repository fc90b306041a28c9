"""Log-sum-exps that drafts leave: whose they are, and the scores that rows take by them."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine import mixed_step
from pillarattn.engine.kept_lse import KeptLse, KeptRound
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.request import SamplingParams
from tests.engine.test_engine import tokens

NEW = 24


def test_a_round_is_covered_once_all_its_drafts_have_left_something():
    kept = KeptRound()
    assert not kept.covers(40, 1)
    assert [kept.keep(40 + i, 40, width=4) for i in range(3)] == [1, 2, 3]
    assert kept.covers(40, 4)
    # A pass that drafts nothing of its own takes the first place for its one row.
    assert kept.covers(40, 1)
    assert not kept.covers(40, 5)
    assert not kept.covers(41, 2)
    kept.forget()
    assert not kept.covers(40, 1)


def test_drafts_that_are_drawn_again_leave_nothing_behind_them():
    kept = KeptRound()
    for position in (40, 41, 42, 41):
        kept.keep(position, 40, width=8)
    assert kept.covers(40, 3)
    assert not kept.covers(40, 4)
    kept.keep(40, 40, width=8)
    assert not kept.covers(40, 3)


@pytest.mark.parametrize("missed", [0, 1])
def test_a_draft_that_another_pass_ran_is_missed(missed):
    kept = KeptRound()
    for i in range(4):
        if i != missed:
            kept.keep(40 + i, 40, width=8)
    assert not kept.covers(40, 5)
    assert kept.covers(40, 1 + missed) == (missed > 0)


def test_places_end():
    kept = KeptRound()
    assert [kept.keep(40 + i, 40, width=2) for i in range(3)] == [1, 2, 0]
    assert kept.keep(39, 40, width=2) == 0
    assert not kept.covers(40, 4)
    assert kept.covers(40, 3)
    assert KeptRound().keep(40, 40, width=0) == 0


def test_what_is_kept_stays_when_memory_moves():
    kept = KeptLse(torch.device("cpu"))
    assert kept.width == 0
    kept.resize((0, 2), seats=3, width=4)
    # Nobody knows yet how many heads there are.
    assert kept.width == 0
    kept.note(0, 6)
    assert kept.fits((0, 2))
    kept.note(2, 6)
    assert not kept.fits((0, 2))
    assert not kept.resize((0, 2), seats=3, width=4)
    assert kept.values.shape == (2, 3, 4, 6)
    assert kept.width == 4
    kept.values[:] = torch.randn(2, 3, 4, 6)
    before = kept.values
    assert kept.resize((0, 2), seats=3, width=4)
    assert kept.values is before
    assert kept.resize((0, 2), seats=5, width=9)
    assert torch.equal(kept.values[:, :3, :4], before)
    kept.note(3, 6)
    assert not kept.resize((0, 2, 3), seats=5, width=9)
    kept.note(3, 4)
    assert not kept.fits((0, 2, 3))
    kept.resize((0, 2, 3), seats=5, width=9)
    assert kept.width == 0


@pytest.fixture
def watched(engine, monkeypatch):
    """Return `watched(**changes)`: an engine over buffers, its scores by pass, and exact reads."""
    hand_over, exact = MixedStep.hand_over_scores, mixed_step.paged_row_scores

    def build(**changes):
        run, found, reads = engine(cruise=False, **changes), [], []
        run.runner.uses_buffers = True

        def handed(self):
            hand_over(self)
            for part in self.parts if self.is_scored else ():
                if part.place is not None:
                    own, rows = part.segment, len(part.segment.tokens)
                    scores = self.scores[:, self.side * self.buffers.sizes.places + part.place]
                    left = scores[:, :, :rows, : own.length].clone()
                    found.append((own.request_id, own.start, self.is_exact, left))

        def read(*given, **named):
            reads.append(int((named["scored"] >= 0).sum()))
            exact(*given, **named)

        monkeypatch.setattr(MixedStep, "hand_over_scores", handed)
        monkeypatch.setattr(mixed_step, "paged_row_scores", read)
        return run, found, reads

    return build


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scores_come_out_of_the_pass_once_drafts_have_left_their_normalisers(
    watched, prompts, alone, monkeypatch, family
):
    """With all keys chosen, a draft's normaliser is the row's: scores are the exact ones."""
    outputs, scores, reads = {}, {}, {}
    for way in ("known", "exact"):
        if way == "exact":
            monkeypatch.setattr(KeptRound, "covers", lambda *_: False)
        run, scores[way], reads[way] = watched(family=family, s=1.0, block_size=16)
        outputs[way] = run.generate(prompts[1:4], SamplingParams(max_tokens=NEW))
    assert tokens(outputs["known"]) == [alone(p, NEW, family) for p in prompts[1:4]]
    assert tokens(outputs["exact"]) == tokens(outputs["known"])
    assert [one[:2] for one in scores["known"]] == [one[:2] for one in scores["exact"]]
    assert all(is_exact for _, _, is_exact, _ in scores["exact"])
    ways = [is_exact for _, _, is_exact, _ in scores["known"]]
    # The first rounds go the exact way: their drafts came before there was room.
    assert ways.count(False) > ways.count(True) > 0
    assert 0 < sum(reads["known"]) < sum(reads["exact"]) / 3
    for (_, _, _, near), (_, _, _, exact) in zip(scores["known"], scores["exact"], strict=True):
        # The row past the last draft has its shares by another row's normaliser.
        last = max(near.shape[2] - 1, 1)
        torch.testing.assert_close(near[:, :, :last], exact[:, :, :last], rtol=1e-4, atol=1e-6)
        assert near.isfinite().all()


def test_drafts_of_few_keys_leave_less_than_all(watched, prompts, alone):
    run, found, _ = watched(s=0.25)
    outputs = run.generate(prompts, SamplingParams(max_tokens=NEW))
    assert tokens(outputs) == [alone(p, NEW) for p in prompts]
    sums = torch.cat(
        [s[0, :, :-1].sum(-1).flatten() for _, _, is_exact, s in found if not is_exact]
    )
    # In the first layer, where both have the same query: less than the normaliser of all keys.
    assert len(sums) > 100
    assert sums.min() > 0.999
    assert sums.max() > 1.1


def test_kinds_tell_whether_keys_are_read_again(watched, prompts, monkeypatch):
    kinds, kind = set(), MixedStep.kind

    def seen(self, *_):
        kinds.add(kind.fget(self)[1:3])
        return begin(self)

    begin = MixedStep.begin
    monkeypatch.setattr(MixedStep, "begin", seen)
    run, *_ = watched()
    run.generate(prompts[1:4], SamplingParams(max_tokens=NEW))
    assert kinds == {(False, False), (True, True), (True, False)}


@pytest.mark.parametrize(("strategy", "is_exact"), [("pillar", False), ("h2o", True)])
def test_what_is_added_up_over_rounds_is_exact(watched, prompts, strategy, is_exact):
    run, scores, _ = watched(strategy=strategy)
    run.generate(prompts[:2], SamplingParams(max_tokens=NEW))
    assert len(scores) > 6
    assert all(exact for _, _, exact, _ in scores) == is_exact
