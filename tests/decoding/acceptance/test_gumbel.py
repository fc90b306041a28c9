"""Gumbel acceptance: one path for a seed, whatever is drafted, and the right law over seeds."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Draft
from pillarattn.decoding.acceptance import GumbelRule, gumbel
from pillarattn.evaluation.sampling_law import exact_law, law_z_score
from pillarattn.kernels import gumbel_argmax
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
    logits = torch.zeros(2000, 6)

    def drawn(seed, step):
        return GumbelRule(seed).draw(logits, [step] * 2000)[0]

    base = drawn(0, 0)
    others = [drawn(0, 1), drawn(1, 0), drawn(0, 300), drawn(2**62, 0), base.roll(1)]
    others += [drawn(0, 1).roll(1), drawn(1, 0).roll(1), drawn(-1, 0)]
    for other in others:
        # They meet as often as chance has it.
        assert abs(int((base == other).sum()) - 2000 / 6) < 4.5 * (2000 * 5 / 36) ** 0.5


def test_a_row_keeps_its_noise_when_it_stands_at_another_step():
    rule, logits = GumbelRule(4), torch.randn(1, 9).repeat(2, 1)
    apart = rule.draw(logits, [3, 8])[0]
    for row, step in ((0, 3), (1, 8)):
        assert rule.draw(logits, [step, step])[0][row] == apart[row]


def test_noise_depends_on_all_bits_of_a_seed_of_any_size():
    logits = torch.zeros(1, 50_000)
    seeds = (5, 5 + 2**32, 5 + 2**40, 5 - 2**63, -5)
    seen = {int(GumbelRule(seed).draw(logits, [3])[0]) for seed in seeds}
    assert len(seen) == len(seeds)
    for seed in seeds:
        assert int(GumbelRule(seed + 2**64).draw(logits, [3])[0]) in seen


@pytest.mark.parametrize("columns", [1, 4])
def test_a_round_is_one_draw_over_all_rows(monkeypatch, columns):
    calls = []

    def spied(logits, keys):
        calls.append((tuple(logits.shape), keys.tolist()))
        return gumbel_argmax(logits, keys)

    monkeypatch.setattr(gumbel, "gumbel_argmax", spied)
    draft = Draft(torch.zeros(3, columns - 1, dtype=torch.int64))
    GumbelRule(7).judge(draft, torch.randn(3, columns, 11), [5, 0, 17])
    keys = [[7, row, step + i] for row, step in enumerate((5, 0, 17)) for i in range(columns)]
    assert calls == [((3 * columns, 11), keys)]


def test_rows_without_a_token_are_told_by_judge_and_not_by_draw():
    logits = torch.randn(3, 2, 5)
    logits[1] = float("-inf")
    logits[2, 0, 3] = float("nan")
    rule, nothing = GumbelRule(3), Draft(torch.zeros(3, 1, dtype=torch.int64))
    verdict = rule.judge(nothing, logits, [0, 0, 0])
    assert verdict.accepted[1:] == [0, 0] and verdict.next_tokens[1:].tolist() == [-1, -1]
    assert rule.draw(logits[:, 0], [0, 0, 0])[0][1:].tolist() == [0, 0]
    assert rule.draw(logits[:0, 0], [])[0].tolist() == []
