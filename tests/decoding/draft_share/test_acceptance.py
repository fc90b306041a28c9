"""The share of the context that follows acceptance: its law, its limits, and a run that uses it."""

from __future__ import annotations

import math

import pytest
import torch

from pillarattn.decoding.draft_share import DRAFT_SHARES, AcceptanceShare, ConstantShare


def test_it_moves_by_the_distance_from_the_target():
    policy = AcceptanceShare(0.75, gain=0.5)
    policy.observe([4, 4], [4, 0])
    assert policy.choose(0.1) == pytest.approx(0.1 * math.exp(0.5 * 0.25))
    policy.observe([4, 4], [4, 4])
    assert policy.choose(0.1) == pytest.approx(0.1)


def test_it_keeps_to_its_limits():
    policy = AcceptanceShare(0.75, gain=1.0, least=0.5, most=3.0)
    for _ in range(30):
        policy.observe([8], [0])
    assert policy.choose(0.1) == pytest.approx(0.3) and policy.choose(0.5) == 1.0
    for _ in range(60):
        policy.observe([8], [8])
    assert policy.choose(0.1) == pytest.approx(0.05)
    assert policy.fresh().choose(0.1) == 0.1


def test_rounds_without_drafts_teach_nothing():
    policy = AcceptanceShare()
    policy.observe([0, 0], [0, 0])
    policy.observe([], [])
    assert policy.choose(0.2) == 0.2


@pytest.mark.parametrize(
    "options", [{"target": 1.0}, {"gain": 0}, {"least": 0}, {"least": 1.5}, {"most": 0.5}]
)
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        AcceptanceShare(**options)


def test_constant_is_s():
    policy = DRAFT_SHARES.get("constant")()
    assert isinstance(policy, ConstantShare)
    policy.observe([8], [0])
    assert policy.choose(0.3) == 0.3


@pytest.mark.parametrize("target", [0.05, 0.95])
def test_a_run_reads_more_or_less_and_its_output_stays(fakes, target):
    lm = fakes.AttentionLM(seed=2)
    prompt = torch.randint(0, lm.vocab, (3, 40), generator=torch.Generator().manual_seed(1))
    sparse = {"s": 0.3, "min_budget": 4, "recent": 1, "sink": 1, "k": 3, "new_tokens": 40}
    constant = fakes.build_run(fakes.AttentionTarget(lm, prompt), **sparse)
    wanted = constant.run().sequences
    assert torch.equal(wanted, fakes.greedy_path(lm, prompt, 40))
    share = AcceptanceShare(target, gain=1.0)
    run = fakes.build_run(fakes.AttentionTarget(lm, prompt), **sparse, draft_share=share)
    assert torch.equal(run.run().sequences, wanted)
    more = run.stats.keys_read_per_draft_step > constant.stats.keys_read_per_draft_step
    assert more is (target > 0.5)
    assert share.choose(0.3) == 0.3  # the object given is not the one that learns
