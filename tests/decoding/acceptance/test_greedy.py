"""Greedy acceptance: argmax and nothing else."""

from __future__ import annotations

import torch

from pillarattn.datatypes import Draft
from pillarattn.decoding.acceptance import GreedyRule


def test_draw_is_the_argmax_and_keeps_no_distribution():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, float("-inf"), 4.0]])
    tokens, q = GreedyRule().draw(logits, [0, 7])
    assert tokens.tolist() == [1, 0] and tokens.dtype == torch.int64 and q is None


def test_judge_accepts_while_drafts_are_the_argmax():
    wanted = torch.tensor([[1, 2, 0, 3], [1, 2, 0, 3], [1, 2, 0, 3]])
    logits = torch.nn.functional.one_hot(wanted, 5).float()
    drafts = torch.tensor([[1, 2, 0], [1, 4, 0], [0, 2, 0]])
    verdict = GreedyRule().judge(Draft(drafts), logits, [0, 0, 0])
    assert verdict.accepted == [3, 1, 0]
    assert verdict.next_tokens.tolist() == [3, 2, 1]


def test_it_uses_no_randomness():
    before = torch.get_rng_state()
    GreedyRule().judge(Draft(torch.zeros(1, 2, dtype=torch.int64)), torch.randn(1, 3, 4), [0])
    torch.manual_seed(0)
    torch.randn(1, 3, 4)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randn(1, 3, 4)
    assert torch.equal(torch.get_rng_state(), after)
