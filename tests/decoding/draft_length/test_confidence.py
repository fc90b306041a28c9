"""Drafts that stop where they are unsure: by the draft's own law, after the token, and exactly."""

from __future__ import annotations

import pytest
import torch

from pillarattn.decoding.acceptance import BlockRule, RejectionRule
from pillarattn.decoding.draft_length import ConfidenceLength
from pillarattn.decoding.drafters import SparseDrafter
from pillarattn.evaluation.sampling_law import exact_law, law_z_score


def test_it_reads_the_top_probability():
    logits = torch.randn(50, 3, 7, dtype=torch.float64) * 3
    logits[0, 0] = float("-inf")
    top = logits.softmax(-1).amax(-1)
    assert torch.equal(ConfidenceLength(0.6).goes_on(logits), top >= 0.6)


@pytest.mark.parametrize("threshold", [0, 1, -0.5, 1.5])
def test_a_threshold_is_a_probability(threshold):
    with pytest.raises(ValueError, match="threshold must be a probability"):
        ConfidenceLength(threshold)


def counting_law(sure):
    """Return logits of a law that goes 0 1 2 3 4 0 ...; after a token of `sure` it is certain."""
    p = torch.zeros(5, 5, 5)
    for now in range(5):
        p[:, now, (now + 1) % 5] = 9.0 if now in sure else 0.5
    return p


def test_a_row_stops_after_the_token_it_was_unsure_of(fakes):
    p = counting_law({0, 1, 3, 4})
    prompt = torch.tensor([[4, 0], [0, 1], [1, 2]])
    run = fakes.build_run(
        fakes.TableTarget(p, p, prompt), k=6, new_tokens=20, strategy="streaming",
        draft_length={"name": "confidence", "threshold": 0.5},
    )  # fmt: skip
    run.start()  # rows end in 1, 2 and 3
    draft = run.draft()
    # After 2 the law is unsure: the token drawn there is the last.
    assert draft.proposed() == [2, 1, 5] and draft.k == 5
    assert draft.tokens[2].tolist() == [4, 0, 1, 2, 3]
    assert len(draft.passes) == 5
    verdict, *_ = run.verify(draft)
    assert verdict.accepted == [2, 1, 5]


def test_the_batch_stops_with_the_last_row_that_matters(fakes):
    p = counting_law({0, 1, 3, 4})
    run = fakes.build_run(
        fakes.TableTarget(p, p, torch.tensor([[0, 1], [1, 2]])), k=6, new_tokens=20,
        strategy="streaming", draft_length="confidence", eos=[3],
    )  # fmt: skip
    run.start()  # rows end in 2 and 3, and 3 is an end
    assert run.draft().k == 1


@pytest.mark.parametrize("rule", [RejectionRule, BlockRule])
def test_5000_draws_follow_the_law(fakes, rule):
    noise = torch.Generator().manual_seed(7)
    p, q = torch.randn(2, 5, 5, 5, generator=noise, dtype=torch.float64) * 1.3
    prompt = torch.tensor([[0, 1]]).repeat(5000, 1)
    run = fakes.build_run(
        fakes.TableTarget(p, q, prompt), k=4, new_tokens=5, do_sample=True, rule=rule(),
        strategy="streaming", draft_length={"name": "confidence", "threshold": 0.5}, eos=[2],
    )  # fmt: skip
    sequences = run.run().sequences.tolist()
    draws = [a[2:end] for a, end in zip(sequences, run.outcome.stopped_at, strict=True)]
    law = exact_law(
        lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=5, eos_token_ids=[2]
    )
    assert law_z_score(draws, law).z < 4
    drafted = run.stats.drafted_by_position
    assert drafted[0] > 1.5 * drafted[1] > 0


def test_leaving_out_the_unsure_token_itself_would_be_seen(fakes):
    """Fault: the token is drawn, and then dropped because it was an unlikely one."""

    class Picky(SparseDrafter):
        def draft(self, request):
            draft = super().draft(request)
            chosen = draft.probs.gather(2, draft.tokens.unsqueeze(2)).squeeze(2)
            draft.lengths = (chosen >= 0.3).long().cumprod(1).sum(1)
            return draft

    noise = torch.Generator().manual_seed(7)
    p, q = torch.randn(2, 5, 5, 5, generator=noise, dtype=torch.float64) * 1.3
    prompt = torch.tensor([[0, 1]]).repeat(5000, 1)
    run = fakes.build_run(
        fakes.TableTarget(p, q, prompt), k=4, new_tokens=5, do_sample=True, drafter=Picky(),
        strategy="streaming",
    )  # fmt: skip
    draws = run.run().sequences[:, 2:].tolist()
    law = exact_law(lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=5)
    assert law_z_score(draws, law).z > 10
