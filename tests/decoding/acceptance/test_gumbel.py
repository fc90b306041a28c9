"""Gumbel acceptance: one path for a seed, whatever is drafted, and the right law over seeds."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Draft
from pillarattn.decoding.acceptance import GumbelRule
from pillarattn.evaluation.sampling_law import exact_law, law_z_score
from pillarattn.modules.strategies import STRATEGIES


def path(fakes, strategy="pillar", k=4, seed=5, lm_seed=2):
    lm = fakes.AttentionLM(seed=lm_seed)
    prompt = torch.arange(60).view(2, 30) % lm.vocab
    run = fakes.build_run(
        fakes.AttentionTarget(lm, prompt),
        k=k,
        new_tokens=30,
        do_sample=True,
        seed=seed,
        strategy=strategy,
        s=0.1,
        min_budget=6,
    )
    return run.run().sequences, run.stats


@pytest.mark.parametrize("strategy", STRATEGIES.names())
@pytest.mark.parametrize("k", [1, 5])
def test_the_path_is_that_of_plain_sampling_with_the_same_noise(fakes, strategy, k):
    plain, _ = path(fakes, k=0)
    drafted, stats = path(fakes, strategy, k)
    assert torch.equal(drafted, plain)
    assert (stats.acceptance_rate == 1) is (strategy == "full")


def test_seeds_reproduce_and_differ(fakes):
    assert torch.equal(path(fakes, seed=5)[0], path(fakes, seed=5)[0])
    assert not torch.equal(path(fakes, seed=5)[0], path(fakes, seed=6)[0])


def test_without_a_seed_the_global_generator_decides():
    logits = torch.randn(50, 20)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(GumbelRule().draw(logits, [0] * 50)[0])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_seed_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    GumbelRule(3).judge(Draft(torch.zeros(1, 1, dtype=torch.int64)), torch.zeros(1, 2, 4), [0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("drafted", [0, 1, 2, 3])
def test_judge_chooses_what_draw_chooses_at_the_same_step(drafted):
    rule, logits, steps = GumbelRule(9), torch.randn(2, 4, 11), [5, 17]
    own = torch.stack(
        [rule.draw(logits[:, i], [step + i for step in steps])[0] for i in range(4)], dim=1
    )
    drafts = own[:, :3].clone()
    drafts[:, drafted:] = (drafts[:, drafted:] + 1) % 11
    verdict = GumbelRule(9).judge(Draft(drafts), logits, steps)
    assert verdict.accepted == [drafted] * 2
    assert torch.equal(verdict.next_tokens, own[:, drafted])


def test_the_argmax_follows_the_softmax():
    logits = torch.randn(8) * 1.5
    logits[3] = float("-inf")
    rule, draws = GumbelRule(1), []
    for step in range(10):
        tokens, q = rule.draw(logits.repeat(2000, 1), [step] * 2000)
        draws += [[t] for t in tokens.tolist()]
    assert q is None
    probs = logits.softmax(0).tolist()
    law = {(token,): mass for token, mass in enumerate(probs) if mass}
    assert law_z_score(draws, law).z < 4
    shifted = {(token,): mass for (token,), mass in zip(law, sorted(law.values()), strict=True)}
    assert law_z_score(draws, shifted).z > 10


def test_sequences_follow_the_law(fakes):
    noise = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 4, 4, 4, generator=noise, dtype=torch.float64)
    prompt = torch.tensor([[0, 1]]).repeat(5000, 1)
    run = fakes.build_run(
        fakes.TableTarget(p, q, prompt),
        k=3,
        new_tokens=4,
        do_sample=True,
        seed=11,
        strategy="streaming",
    )
    draws = run.run().sequences[:, 2:].tolist()
    law = exact_law(lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=4)
    assert law_z_score(draws, law).z < 4


def test_noise_of_rows_steps_and_seeds_is_independent():
    logits = torch.zeros(300, 60)

    def noise(seed, step):
        return GumbelRule(seed)._noise(logits, [step] * 300)

    base = noise(0, 0)
    # A Gumbel variable has mean 0.5772 and variance pi^2 / 6.
    assert float(base.mean()) == pytest.approx(0.5772, abs=0.04)
    assert float(base.var()) == pytest.approx(torch.pi**2 / 6, abs=0.1)
    others = [noise(0, 1), noise(1, 0), noise(0, 300), noise(2**62, 0), base.roll(1, 0)]
    others += [base.roll(1, 1), noise(0, 1).roll(1, 0), noise(1, 0).roll(1, 0)]
    for other in others:
        both = torch.stack([base.flatten(), other.flatten()])
        assert abs(float(both.corrcoef()[0, 1])) < 4.5 / base.numel() ** 0.5
        assert not (base == other).any(dim=1).all()


def test_a_row_keeps_its_noise_when_it_stands_at_another_step():
    rule, logits = GumbelRule(4), torch.randn(1, 9).repeat(2, 1)
    apart = rule.draw(logits, [3, 8])[0]
    for row, step in ((0, 3), (1, 8)):
        assert rule.draw(logits, [step, step])[0][row] == apart[row]


def test_noise_depends_on_more_than_32_bits():
    logits = torch.zeros(1, 50)
    seen = {GumbelRule(seed)._noise(logits, [3])[0, 0].item() for seed in (5, 5 + 2**32, 5 + 2**40)}
    assert len(seen) == 3
