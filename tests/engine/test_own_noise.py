"""Rules of one request's own noise: the global generator is left alone, and seeds repeat."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import Draft
from pillarattn.engine.own_noise import OwnBlock, OwnRejection


@pytest.mark.parametrize("rule", [OwnRejection, OwnBlock])
def test_nobody_elses_draws_matter(rule):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, 50, generator=generator)

    def path(between=lambda: None):
        own, seen = rule(3), []
        for _ in range(20):
            draws = [own.draw(logits[:, i], [i]) for i in range(3)]
            between()
            draft = Draft(
                torch.stack([t for t, _ in draws], 1), torch.stack([q for _, q in draws], 1)
            )
            verdict = own.judge(draft, 2 * logits, [0])
            seen.append((draft.tokens.tolist(), verdict.accepted, verdict.next_tokens.tolist()))
        return seen

    before = torch.random.get_rng_state()
    first = path()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert path(lambda: torch.rand(7)) == first
    # The noise goes on: rounds of the same logits are not all alike.
    assert len({str(round) for round in first}) > 10


def test_a_draft_that_is_forgotten_comes_again():
    """What it was may have decided that it was forgotten: another one would be biased."""
    own, logits, seen = OwnRejection(5), torch.zeros(1, 2, 1000), []
    for _ in range(3):
        token, _ = own.draw(logits[:, 0], [0])
        own.drafts = 0
        again, law = own.draw(logits[:, 0], [0])
        assert torch.equal(again, token)
        own.judge(Draft(token.unsqueeze(1), law.unsqueeze(1)), logits, [0])
        seen.append(int(token))
    assert len(set(seen)) == 3


@pytest.mark.parametrize("rule", [OwnRejection, OwnBlock])
def test_without_a_seed_it_differs(rule):
    logits = torch.zeros(1, 10_000)
    assert rule().draw(logits, [0])[0] != rule().draw(logits, [0])[0]
