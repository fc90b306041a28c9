"""The sparse drafter: k single steps over frozen keys, and a cache at the length it was."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Phase, RowLengths
from pillarattn.decoding.acceptance import GreedyRule, RejectionRule
from pillarattn.decoding.drafters import DRAFTERS, DraftRequest, SparseDrafter
from pillarattn.decoding.history import History
from pillarattn.modules.step import StepState


class Spy:
    """Passes logits through and keeps what it was asked."""

    def __init__(self):
        self.starts, self.seen = [], []

    def __call__(self, history, starts, logits):
        self.starts.append(list(starts))
        self.seen.append([history.ids[row, : starts[row]].tolist() for row in range(history.batch)])
        return logits


@pytest.fixture
def drafted(fakes):
    def run(rule, k=3):
        noise = torch.Generator().manual_seed(0)
        p, q = torch.randn(2, 6, 6, 6, generator=noise, dtype=torch.float64) * 2
        prompt = torch.tensor([[0, 1], [2, 3]])
        target = fakes.TableTarget(p, q, prompt)
        target.prefill(StepState(Phase.PREFILL))
        history, process, step = History(prompt, 20, 0), Spy(), StepState(Phase.DRAFT)
        # Ragged rows: row 1 has two tokens more; the newest token has no keys yet.
        extra = torch.tensor([[4, 4], [4, 5]])
        target.forward(extra, StepState(Phase.VERIFY))
        target.cache.roll_back(RowLengths([2, 4], "cpu"))
        history.commit(0, [5])
        history.commit(1, [4, 5, 1])
        before = target.cache.lengths
        draft = SparseDrafter().draft(DraftRequest(target, history, rule, process, step, k))
        assert target.cache.lengths is before
        return draft, history, process, q

    return run


@pytest.mark.parametrize("k", [1, 3, 5])
def test_each_step_sees_the_drafts_before_it(drafted, k):
    draft, history, process, q = drafted(GreedyRule(), k)
    assert draft.k == k and draft.probs is None and draft.lengths is None
    assert draft.passes == [[i + 1] * 2 for i in range(k)]
    for row, (before, now) in enumerate(((1, 5), (5, 1))):
        for i in range(k):
            token = int(q[before, now].argmax())
            assert int(draft.tokens[row, i]) == token
            before, now = now, token
    assert history.lengths == [3, 5]
    for row in range(2):
        end = history.lengths[row]
        assert history.ids[row, end : end + k].tolist() == draft.tokens[row].tolist()
    assert process.starts == [[3 + i, 5 + i] for i in range(k)]
    assert process.seen[-1][0] == [0, 1, 5, *draft.tokens[0, : k - 1].tolist()]


def test_it_keeps_the_distribution_each_token_was_drawn_from(drafted):
    draft, _, _, q = drafted(RejectionRule())
    assert draft.probs.shape == (2, 3, 6)
    for row, (before, now) in enumerate(((1, 5), (5, 1))):
        for i in range(3):
            torch.testing.assert_close(draft.probs[row, i], q[before, now].softmax(-1))
            before, now = now, int(draft.tokens[row, i])


def test_a_rule_is_told_the_index_of_each_new_token(drafted):
    told = []

    class Steps(GreedyRule):
        def draw(self, logits, steps):
            told.append(steps)
            return super().draw(logits, steps)

    drafted(Steps())
    assert told == [[1, 3], [2, 4], [3, 5]]


def test_it_is_registered():
    assert DRAFTERS.get("sparse") is SparseDrafter


def test_weights_are_named_and_asked_of_the_target():
    class Rounding:
        def draft_with(self, weights):
            asked.append(weights)

    asked: list[str] = []
    for weights in ("own", "bfloat16", "int8"):
        SparseDrafter(weights).attach(Rounding())
    assert asked == ["bfloat16", "int8"]
    SparseDrafter().attach(object())
    with pytest.raises(ValueError, match="weights='int8' needs a target that can round"):
        SparseDrafter("int8").attach(object())
    with pytest.raises(ValueError, match="one of 'own', 'bfloat16', 'int8', got 'int4'"):
        SparseDrafter("int4")
    assert SparseDrafter("int8").to_dict() == {"name": "sparse", "weights": "int8"}
