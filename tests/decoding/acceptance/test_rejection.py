"""Rejection sampling follows the target's law: enumerated exactly, drawn, and with faults seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance import RejectionRule
from pillarattn.decoding.acceptance import rejection as module
from pillarattn.decoding.drafters import SparseDrafter
from pillarattn.evaluation.sampling_law import exact_law, law_z_score
from pillarattn.kernels import rejection_sample

DRAWS, NEW, SIZE = 5000, 5, 5


def tables(vocabulary, k, seed, sparse):
    """Return the laws p and q after every path of up to k tokens, some with zeros."""
    noise = torch.Generator().manual_seed(seed)

    def law():
        logits = torch.randn(vocabulary, dtype=torch.float64, generator=noise) * 1.5
        if sparse:
            allowed = torch.rand(vocabulary, generator=noise) < 0.5
            allowed[torch.randint(vocabulary, (), generator=noise)] = True
            logits = logits.masked_fill(~allowed, float("-inf"))
        return logits.softmax(0)

    paths = [path for n in range(k + 1) for path in product(range(vocabulary), repeat=n)]
    return {path: law() for path in paths}, {path: law() for path in paths}


def judge(monkeypatch, draft, p, uniforms, noise):
    fixed = partial(rejection_sample, uniforms=uniforms, noise=noise)
    monkeypatch.setattr(module, "rejection_sample", fixed)
    return RejectionRule().judge(draft, p.log(), [0])


def race_of(monkeypatch, draft, p, uniforms, weights):
    """Assert that the next token is drawn with these weights: it has the smallest noise / weight.

    Noise equal to the weights is a tie of all; a billionth less makes a token win.
    """
    floor = torch.where(weights > 0, weights, torch.tensor(1e-300, dtype=torch.float64))
    for token in range(len(weights)):
        noise = floor.clone()
        if weights[token] == 0:
            continue
        noise[token] *= 1 - 1e-9
        verdict = judge(monkeypatch, draft, p, uniforms, noise[None])
        assert verdict.next_tokens.tolist() == [token]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("vocabulary", "k"), [(3, 1), (5, 1), (4, 2), (3, 3)])
def test_the_enumerated_law_of_a_block_is_the_targets(monkeypatch, vocabulary, k, sparse):
    p_of, q_of = tables(vocabulary, k, seed=vocabulary * 10 + k, sparse=sparse)
    law = dict.fromkeys(product(range(vocabulary), repeat=k + 1), 0.0)

    def spread(tokens, mass):
        """Complete a block that stops early as the rounds after it would: from p."""
        if len(tokens) == k + 1:
            law[tokens] += mass
            return
        for token in range(vocabulary):
            spread((*tokens, token), mass * float(p_of[tokens][token]))

    for path in product(range(vocabulary), repeat=k):
        reach = 1.0  # chance of drafting this path
        for i in range(k):
            reach *= float(q_of[path[:i]][path[i]])
        if reach == 0:
            continue
        p = torch.stack([p_of[path[:i]] for i in range(k + 1)])[None]
        q = torch.stack([q_of[path[:i]] for i in range(k)])[None]
        draft = Draft(torch.tensor([path]), q)
        ones = torch.ones(1, vocabulary, dtype=torch.float64)
        for i, token in enumerate(path):
            here, there = p[0, i], q[0, i]
            ratio = min(1.0, float(here[token] / there[token]))
            # The rule accepts below the ratio and rejects above it ...
            for u, accepted in ((ratio * (1 - 1e-9), ratio > 0), (ratio * (1 + 1e-9), False)):
                uniforms = torch.zeros(1, k, dtype=torch.float64)
                uniforms[0, i] = min(u, 1 - 1e-15)
                verdict = judge(monkeypatch, draft, p, uniforms, ones)
                if u < 1 and all(p[0, j, path[j]] > 0 for j in range(i)):
                    assert (verdict.accepted[0] > i) is accepted
            # ... and then draws from the residual.
            residual = (here - there).clamp_min(0)
            if ratio < 1 and all(p[0, j, path[j]] > 0 for j in range(i)):
                uniforms[0, i] = 1 - 1e-15
                race_of(monkeypatch, draft, p, uniforms, residual)
            if ratio < 1:
                for other in range(vocabulary):
                    share = float(residual[other] / residual.sum())
                    if share > 0:
                        spread((*path[:i], other), reach * (1 - ratio) * share)
            reach *= ratio
        if reach > 0:
            race_of(monkeypatch, draft, p, torch.zeros(1, k, dtype=torch.float64), p[0, k])
            for bonus in range(vocabulary):
                spread((*path, bonus), reach * float(p[0, k, bonus]))

    for tokens, mass in law.items():
        wanted = 1.0
        for i in range(k + 1):
            wanted *= float(p_of[tokens[:i]][tokens[i]])
        law[tokens] = abs(mass - wanted)
    assert sum(law.values()) / 2 < 1e-12


def test_draw_samples_what_it_reports():
    logits = torch.randn(1, 6).repeat(20000, 1)
    logits[:, 2] = float("-inf")
    tokens, q = RejectionRule().draw(logits, [0] * 20000)
    torch.testing.assert_close(q, logits.softmax(-1))
    law = {(token,): float(q[0, token]) for token in range(6) if token != 2}
    assert law_z_score([[t] for t in tokens.tolist()], law).z < 4


@pytest.fixture(scope="module")
def laws():
    noise = torch.Generator().manual_seed(7)
    p, q = torch.randn(2, SIZE, SIZE, SIZE, generator=noise, dtype=torch.float64) * 1.3
    bias = torch.randn(SIZE, generator=noise, dtype=torch.float64) * 1.3
    return p, q, bias


@pytest.fixture(scope="module")
def enumerated():
    """The exact laws that have been enumerated, by end tokens."""
    return {}


@pytest.fixture
def z_of(fakes, laws, enumerated):
    """Return the z score of 5,000 sequences drawn through the whole loop."""
    p, q, bias = laws

    def z(*, rule=None, drafter=None, k=3, eos=()):
        def process(history, starts, logits):
            return logits + bias

        prompt = torch.tensor([[0, 1]]).repeat(DRAWS, 1)
        run = fakes.build_run(
            fakes.TableTarget(p, q, prompt),
            k=k,
            new_tokens=NEW,
            do_sample=True,
            strategy="streaming",
            rule=rule,
            drafter=drafter,
            process=process,
            eos=eos,
        )
        sequences = run.run().sequences.tolist()
        ends = run.outcome.stopped_at
        draws = [line[2:end] for line, end in zip(sequences, ends, strict=True)]
        if eos not in enumerated:
            enumerated[eos] = exact_law(
                lambda ids: p[ids[:, -2], ids[:, -1]] + bias,
                prompt[0],
                new_tokens=NEW,
                eos_token_ids=eos,
            )
        return law_z_score(draws, enumerated[eos]).z, run.stats

    return z


class FromP(RejectionRule):
    """Fault: a rejected draft is replaced by a sample of p."""

    def judge(self, draft, logits, steps):
        accepted = super().judge(draft, logits, steps).accepted
        p = logits[torch.arange(len(accepted)), torch.tensor(accepted)].softmax(-1)
        return Verdict(accepted, p.multinomial(1).squeeze(1))


class ArgmaxOfP(RejectionRule):
    """Fault: no residual, a rejected draft is replaced by the most likely token."""

    def judge(self, draft, logits, steps):
        verdict = super().judge(draft, logits, steps)
        accepted = torch.tensor(verdict.accepted)
        best = logits[torch.arange(len(accepted)), accepted].argmax(-1)
        return Verdict(verdict.accepted, torch.where(accepted < draft.k, best, verdict.next_tokens))


class KeepsTheDraft(RejectionRule):
    """Fault: no residual, a rejected draft is emitted all the same."""

    def judge(self, draft, logits, steps):
        verdict = super().judge(draft, logits, steps)
        if draft.k == 0:
            return verdict
        accepted = torch.tensor(verdict.accepted)
        own = draft.tokens.gather(1, accepted.clamp_max(draft.k - 1)[:, None]).squeeze(1)
        return Verdict(verdict.accepted, torch.where(accepted < draft.k, own, verdict.next_tokens))


class Recorded(RejectionRule):
    """Draws from one function of the logits and reports another as q."""

    def __init__(self, drawn, reported):
        super().__init__()
        self.drawn, self.reported = drawn, reported

    def draw(self, logits, steps):
        tokens, _ = super().draw(self.drawn(logits), steps)
        return tokens, self.reported(logits).softmax(-1)


class WithRule(SparseDrafter):
    """Drafts with a rule of its own, so that only drafts have its faults."""

    def __init__(self, **changes):
        self.changes = changes

    def draft(self, request):
        return super().draft(replace(request, **self.changes))


def same(logits):
    return logits


@pytest.mark.parametrize(("k", "eos"), [(0, ()), (1, (2,)), (3, ()), (4, (2,))])
def test_5000_draws_follow_the_law(z_of, k, eos):
    z, stats = z_of(k=k, eos=eos)
    assert z < 4
    if k:
        assert 0.2 < stats.acceptance_rate < 0.8


def test_drafts_that_skip_processing_honestly_are_lossless(z_of, fakes):
    z, stats = z_of(drafter=WithRule(process=fakes.no_rule))
    assert z < 4
    assert stats.acceptance_rate < z_of()[1].acceptance_rate


@pytest.mark.parametrize("fault", [FromP, ArgmaxOfP, KeepsTheDraft])
def test_a_missing_residual_is_seen(z_of, fault):
    assert z_of(rule=fault())[0] > 10


@pytest.mark.parametrize("temperature", [0.4, 2.5])
def test_a_wrong_temperature_on_q_is_seen(z_of, temperature):
    rule = Recorded(same, lambda logits: logits / temperature)
    assert z_of(drafter=WithRule(rule=rule))[0] > 10


def test_drafts_at_another_temperature_are_lossless_if_q_says_so(z_of):
    rule = Recorded(lambda logits: logits / 2.5, lambda logits: logits / 2.5)
    assert z_of(drafter=WithRule(rule=rule))[0] < 4


def test_processors_skipped_in_drafts_are_seen(z_of, laws):
    bias = laws[2]
    unprocessed_q = Recorded(same, lambda logits: logits - bias)
    assert z_of(drafter=WithRule(rule=unprocessed_q))[0] > 10
    unprocessed_draws = Recorded(lambda logits: logits - bias, same)
    assert z_of(drafter=WithRule(rule=unprocessed_draws))[0] > 10


def test_acceptance_is_the_overlap_of_p_and_q(z_of, laws, fakes):
    # At the first position all rows have the same context after one token.
    p, q, bias = laws
    _, stats = z_of(k=1)
    first = (p[0, 1] + bias).softmax(-1)
    second = torch.minimum((p[1] + bias).softmax(-1), (q[1] + bias).softmax(-1)).sum(-1)
    accepted = sum(rounds[0] for rounds in stats.accepted_per_round) / DRAWS
    expected = float((first * second).sum())
    assert accepted == pytest.approx(expected, abs=4 * (expected * (1 - expected) / DRAWS) ** 0.5)
