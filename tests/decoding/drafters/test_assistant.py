"""A small model as the drafter: it keeps what it has read, and the output is the target's."""

from __future__ import annotations

import pytest
import torch

from pillarattn import SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.decoding.acceptance import BlockRule, RejectionRule
from pillarattn.decoding.drafters import AssistantDrafter
from pillarattn.evaluation.sampling_law import exact_law, law_z_score


@pytest.fixture(scope="module")
def lm(fakes):
    return fakes.AttentionLM(seed=2)


@pytest.fixture(scope="module")
def prompt(lm):
    return torch.randint(0, lm.vocab, (3, 40), generator=torch.Generator().manual_seed(1))


def built(fakes, lm, prompt, drafter, **options):
    return fakes.build_run(fakes.AttentionTarget(lm, prompt), new_tokens=30, drafter=drafter,
                           **options)  # fmt: skip


def kept(target):
    """Return an assistant whose target the test can look at."""
    return AssistantDrafter(lambda: target)


@pytest.mark.parametrize("k", [1, 5])
def test_the_output_is_the_targets(fakes, lm, prompt, k):
    plain = fakes.greedy_path(lm, prompt, 30)
    other = fakes.AttentionTarget(fakes.AttentionLM(seed=2, layers=1), prompt)
    run = built(fakes, lm, prompt, kept(other), k=k)
    assert torch.equal(run.run().sequences, plain)
    assert 0 < run.stats.accepted < run.stats.drafted
    assert run.selections == {} and run.stats.draft_steps == 0


@pytest.mark.parametrize("k", [1, 5])
def test_an_assistant_that_is_the_target_is_always_right(fakes, lm, prompt, k):
    assistant = fakes.AttentionTarget(lm, prompt)
    run = built(fakes, lm, prompt, kept(assistant), k=k)
    assert torch.equal(run.run().sequences, fakes.greedy_path(lm, prompt, 30))
    assert run.stats.acceptance_rate == 1.0
    # The prompt, then one pass a draft: the first of a round reads both tokens it has missed.
    assert len(assistant.steps) == 1 + run.stats.drafted // 3
    assert {step.phase for step in assistant.steps} == {Phase.PREFILL, Phase.VERIFY}


def test_what_it_has_read_stays_unless_it_was_refused(fakes, lm, prompt):
    other = fakes.AttentionTarget(fakes.AttentionLM(seed=2, layers=1), prompt)
    run = built(fakes, lm, prompt, kept(other), k=4)
    run.start()
    while not run.outcome.is_complete:
        draft = run.draft()
        if draft.k:
            read = run.drafter._read
            for row, n in enumerate(read):
                assert other.cache.lengths.host[row] == n
                ids = run.history.ids[row : row + 1, :n]
                for (_, k, v), layer in zip(other.lm.dense(ids).layers, other.cache.layers,
                                            strict=True):  # fmt: skip
                    keys, values = (t[row : row + 1, :, :n] for t in layer.views())
                    torch.testing.assert_close(keys, k, rtol=0, atol=1e-10)
                    torch.testing.assert_close(values, v, rtol=0, atol=1e-10)
        verdict, scores, raw, buffer = run.verify(draft)
        run.accept(draft, verdict, scores, raw)
        run.select(buffer)


@pytest.mark.parametrize("rule", [RejectionRule, BlockRule])
def test_5000_draws_follow_the_law(fakes, rule):
    noise = torch.Generator().manual_seed(7)
    p, low = torch.randn(2, 5, 5, 5, generator=noise, dtype=torch.float64) * 1.3
    prompt = torch.tensor([[0, 1]]).repeat(5000, 1)
    drafter = kept(fakes.TableTarget(low, low, prompt))
    run = fakes.build_run(
        fakes.TableTarget(p, p, prompt), k=3, new_tokens=5, do_sample=True, rule=rule(),
        drafter=drafter, eos=[2],
    )  # fmt: skip
    sequences = run.run().sequences.tolist()
    draws = [a[2:end] for a, end in zip(sequences, run.outcome.stopped_at, strict=True)]
    law = exact_law(
        lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=5, eos_token_ids=[2]
    )
    assert law_z_score(draws, law).z < 4
    assert 0.2 < run.stats.acceptance_rate < 0.8


@pytest.mark.parametrize("size", [4, 6])
def test_vocabularies_that_are_padded_differently(fakes, size):
    """An assistant of 4 tokens never drafts the fifth; of one of 6, the sixth is left out."""
    noise = torch.Generator().manual_seed(7)
    p = torch.randn(5, 5, 5, generator=noise, dtype=torch.float64)
    low = torch.randn(6, 6, size, generator=noise, dtype=torch.float64)
    prompt = torch.tensor([[0, 1]]).repeat(5000, 1)
    run = fakes.build_run(
        fakes.TableTarget(p, p, prompt), k=2, new_tokens=4, do_sample=True,
        drafter=kept(fakes.TableTarget(low, low, prompt)),
    )  # fmt: skip
    draws = run.run().sequences[:, 2:].tolist()
    law = exact_law(lambda ids: p[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=4)
    assert law_z_score(draws, law).z < 4
    assert run.stats.accepted > 0


def test_it_serves_one_generation_after_another(fakes, lm, prompt):
    generator = SelfSpeculativeGenerator(
        drafter=AssistantDrafter(lambda: fakes.AttentionTarget(lm, prompt))
    )
    for _ in range(2):
        run = built(fakes, lm, prompt, generator.new_drafter())
        assert torch.equal(run.run().sequences, fakes.greedy_path(lm, prompt, 30))
    assert generator.config.to_dict()["drafter"] == {"name": "assistant"}


def test_errors_say_what_to_do(fakes, lm, prompt):
    with pytest.raises(ValueError, match=r"pass drafter=AssistantDrafter\(model\)"):
        SelfSpeculativeGenerator(drafter="assistant")
    run = built(fakes, lm, prompt, AssistantDrafter(lambda: None))
    run.drafter.reset()
    with pytest.raises(ValueError, match="has not been prepared"):
        run.run()
    recurrent = fakes.AttentionTarget(lm, prompt)
    recurrent.cuts = False
    with pytest.raises(ValueError, match="go back to any length"):
        built(fakes, lm, prompt, kept(recurrent)).run()
