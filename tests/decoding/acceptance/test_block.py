"""Block verification: the same law as token by token, enumerated, and never less accepted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance import ACCEPTANCE, BlockRule, RejectionRule
from pillarattn.decoding.acceptance import block as module
from tests.decoding.enumeration import law_of, load, total_variation


def tables(vocabulary, k, seed, sparse=False):
    """Return logits of the laws p and q after every path of up to k tokens, some with zeros."""
    noise = torch.Generator().manual_seed(seed)

    def logits():
        drawn = torch.randn(vocabulary, dtype=torch.float64, generator=noise) * 1.5
        if sparse:
            allowed = torch.rand(vocabulary, generator=noise) < 0.6
            allowed[torch.randint(vocabulary, (), generator=noise)] = True
            drawn = drawn.masked_fill(~allowed, float("-inf"))
        return drawn

    paths = [path for n in range(k + 1) for path in product(range(vocabulary), repeat=n)]
    return {path: logits() for path in paths}, {path: logits() for path in paths}


def block_of(rule, p_of, q_of, k, *, ends=None):
    """Draft from q and judge by p; return the tokens and how many drafts were accepted.

    `ends(path)` says that a draft ends there.
    """
    path, q = (), []
    while len(path) < k and not (path and ends and ends(path)):
        token, law = rule.draw(q_of[path][None], [0])
        q.append(law[0])
        path = (*path, int(token))
    padded = [*path, *[0] * (k - len(path))]
    filler = [torch.full_like(q[0], 0.5)] * (k - len(path))
    draft = Draft(
        torch.tensor([padded]),
        torch.stack([*q, *filler])[None],
        lengths=torch.tensor([len(path)]) if ends else None,
    )
    rows = [p_of[path[:i]] for i in range(len(path) + 1)]
    rows += [torch.zeros_like(rows[0])] * (k - len(path))
    verdict = rule.judge(draft, torch.stack(rows)[None], [0])
    return (*path[: verdict.accepted[0]], int(verdict.next_tokens)), verdict.accepted[0]


def completed(law, p_of, k):
    """Complete blocks that stop early from p, as the rounds after them would."""
    whole = dict.fromkeys(product(range(len(p_of[()])), repeat=k + 1), 0.0)
    for tokens, mass in law.items():
        for rest in product(range(len(p_of[()])), repeat=k + 1 - len(tokens)):
            share = mass
            for i in range(len(tokens), k + 1):
                path = (*tokens, *rest)
                share *= float(p_of[path[:i]].softmax(-1)[path[i]])
            whole[(*tokens, *rest)] += share
    return whole


def wanted(p_of, vocabulary, k):
    law = {}
    for tokens in product(range(vocabulary), repeat=k + 1):
        law[tokens] = 1.0
        for i in range(k + 1):
            law[tokens] *= float(p_of[tokens[:i]].softmax(-1)[tokens[i]])
    return law


def measured(monkeypatch, rule, p_of, q_of, k, **options):
    def play(dice):
        with monkeypatch.context() as patch:
            load(patch, dice)
            rule.dice = dice
            return block_of(rule, p_of, q_of, k, **options)

    law, mean = law_of(play)
    return completed(law, p_of, k), mean


SHAPES = [(5, 1), (3, 2), (2, 3)]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("vocabulary", "k"), SHAPES)
def test_the_enumerated_law_is_the_targets_and_no_less_is_accepted(
    monkeypatch, vocabulary, k, sparse
):
    p_of, q_of = tables(vocabulary, k, seed=vocabulary * 10 + k, sparse=sparse)
    law, accepted = measured(monkeypatch, BlockRule(), p_of, q_of, k)
    assert total_variation(law, wanted(p_of, vocabulary, k)) < 1e-12
    law, by_token = measured(monkeypatch, RejectionRule(), p_of, q_of, k)
    assert total_variation(law, wanted(p_of, vocabulary, k)) < 1e-12
    assert accepted >= by_token - 1e-12
    if k == 1:
        assert accepted == pytest.approx(by_token, abs=1e-12)
    elif not sparse:
        assert accepted > by_token + 1e-3


@pytest.mark.parametrize("rule", [BlockRule, RejectionRule])
def test_a_draft_may_end_where_its_own_tokens_say(monkeypatch, rule):
    p_of, q_of = tables(3, 3, seed=4)

    def ends(path):
        return path[-1] == 1

    law, _ = measured(monkeypatch, rule(), p_of, q_of, 3, ends=ends)
    assert total_variation(law, wanted(p_of, 3, 3)) < 1e-12


def test_a_draft_that_leaves_out_what_it_has_seen_is_not_lossless(monkeypatch):
    """Why a policy may not drop the token it has drawn: the enumeration sees the bent law."""
    p_of, q_of = tables(3, 2, seed=4)

    class Picky(RejectionRule):
        def judge(self, draft, logits, steps):
            if draft.k == 2 and int(draft.tokens[0, 1]) == 1:
                draft = replace(draft, lengths=torch.tensor([1]))
            return super().judge(draft, logits, steps)

    law, _ = measured(monkeypatch, Picky(), p_of, q_of, 2)
    assert total_variation(law, wanted(p_of, 3, 2)) > 1e-3


def test_point_masses_are_judged_exactly(monkeypatch):
    p_of, _ = tables(3, 2, seed=9)
    rules = {name: ACCEPTANCE.get(name)() for name in ("block", "rejection")}
    means = {}
    for name, rule in rules.items():

        def play(dice, rule=rule):
            path = (1, 2)
            rows = torch.stack([p_of[path[:i]] for i in range(3)])[None]
            with monkeypatch.context() as patch:
                load(patch, dice)
                verdict = rule.judge(Draft(torch.tensor([path])), rows, [0])
            return (*path[: verdict.accepted[0]], int(verdict.next_tokens)), verdict.accepted[0]

        law, means[name] = law_of(play)
        assert total_variation(completed(law, p_of, 2), wanted(p_of, 3, 2)) < 1e-12
    assert means["block"] >= means["rejection"] - 1e-12


class LastTestOnly(BlockRule):
    """Fault: a draft is accepted as a whole or not at all, with the residual of the first token."""

    def judge(self, draft, logits, steps):
        verdict = super().judge(draft, logits, steps)
        return Verdict([a if a == draft.k else 0 for a in verdict.accepted], verdict.next_tokens)


class TokenWiseResidual(BlockRule):
    """Fault: the residual forgets the weight of the tokens before it."""

    def judge(self, draft, logits, steps):
        verdict = super().judge(draft, logits, steps)
        a = verdict.accepted[0]
        if a < draft.k:
            rest = (logits[0, a].softmax(-1) - draft.probs[0, a]).clamp_min(0)
            return Verdict([a], torch.tensor([self.dice.choose(rest.tolist())]))
        return verdict


@pytest.mark.parametrize("fault", [LastTestOnly, TokenWiseResidual])
def test_faults_are_seen(monkeypatch, fault):
    p_of, q_of = tables(5, 2, seed=1)
    law, _ = measured(monkeypatch, fault(), p_of, q_of, 2)
    assert total_variation(law, wanted(p_of, 5, 2)) > 1e-3


def test_equal_laws_accept_everything():
    logits = torch.randn(50, 5, 7)
    probs = logits.softmax(-1)
    tokens = probs[:, :4].reshape(-1, 7).multinomial(1).view(50, 4)
    verdict = BlockRule().judge(Draft(tokens, probs[:, :4]), logits, [0] * 50)
    assert verdict.accepted == [4] * 50


def test_impossible_drafts_are_refused_and_an_impossible_next_token_is_told():
    logits = torch.zeros(3, 3, 4)
    logits[0, 0, 1] = float("-inf")  # the first draft is impossible
    logits[1, 1:] = float("-inf")  # nothing follows the first draft
    logits[2] = float("nan")
    probs = torch.full((3, 2, 4), 0.25)
    for _ in range(20):
        verdict = BlockRule().judge(Draft(torch.ones(3, 2).long(), probs), logits, [0] * 3)
        assert verdict.accepted == [0, 1, 0]
        assert int(verdict.next_tokens[0]) in (0, 2, 3)
        assert verdict.next_tokens[1:].tolist() == [-1, -1]


def test_noise_is_new_each_time(monkeypatch):
    seen = []
    monkeypatch.setattr(
        module, "block_verify", lambda *a, **k: seen.append(k) or (torch.zeros(1), torch.zeros(1))
    )
    for _ in range(2):
        BlockRule().judge(Draft(torch.zeros(1, 3).long()), torch.zeros(1, 4, 5), [0])
    assert seen[0]["uniforms"].shape == (1, 3) and seen[0]["noise"].shape == (1, 5)
    assert not torch.equal(seen[0]["uniforms"], seen[1]["uniforms"])
    assert not torch.equal(seen[0]["noise"], seen[1]["noise"])
