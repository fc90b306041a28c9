"""Logits that allow no token: an error where plain decoding would meet them, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from pillarattn.decoding.acceptance import BlockRule, GumbelRule, RejectionRule
from pillarattn.evaluation.sampling_law import exact_law, law_z_score

END = 3
RULES = {"rejection": RejectionRule, "block": BlockRule, "gumbel": lambda: GumbelRule(5)}
NOTHING = float("-inf")


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [NOTHING, float("nan")])
def test_drafts_of_rows_past_their_end_never_fail(name, value):
    rule = RULES[name]()
    logits = torch.randn(3, 6)
    logits[1] = value
    tokens, q = rule.draw(logits, [0, 0, 0])
    assert all(0 <= token < 6 for token in tokens.tolist())
    if q is not None:
        torch.testing.assert_close(q[1], torch.full((6,), 1 / 6))
        torch.testing.assert_close(q.sum(-1), torch.ones(3))


@pytest.fixture(scope="module")
def law():
    noise = torch.Generator().manual_seed(3)
    return torch.randn(4, 4, 4, generator=noise, dtype=torch.float64)


def grammar(history, starts, logits):
    """Allow nothing after the end token, as a grammar that is complete does."""
    out = logits.clone()
    for row, start in enumerate(starts):
        for i in range(logits.shape[1]):
            if int(history.ids[row, start + i - 1]) == END:
                out[row, i] = NOTHING
    return out


@pytest.mark.parametrize("name", RULES)
def test_a_grammar_that_ends_with_the_text_is_no_error(fakes, law, name):
    prompt = torch.tensor([[0, 1]]).repeat(4000, 1)
    run = fakes.build_run(
        fakes.TableTarget(law, law.flip(2), prompt), k=3, new_tokens=4, do_sample=True,
        rule=RULES[name](), process=grammar, eos=[END], strategy="streaming",
    )  # fmt: skip
    sequences = run.run().sequences.tolist()
    ends = run.outcome.stopped_at
    draws = [line[2:end] for line, end in zip(sequences, ends, strict=True)]
    wanted = exact_law(
        lambda ids: law[ids[:, -2], ids[:, -1]], prompt[0], new_tokens=4, eos_token_ids=[END]
    )
    assert law_z_score(draws, wanted).z < 4
    assert run.stats.accepted > 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("k", [0, 3])
def test_a_text_that_cannot_go_on_is_an_error_as_in_plain_sampling(fakes, law, name, k):
    run = fakes.build_run(
        fakes.TableTarget(law, law, torch.tensor([[0, 1]] * 3)), k=k, new_tokens=40,
        do_sample=True, rule=RULES[name](), process=grammar, strategy="streaming",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"row \d has no possible token after \d+"):
        run.run()


@pytest.mark.parametrize("value", [NOTHING, float("nan")])
def test_a_prompt_that_nothing_follows_is_an_error(fakes, law, value):
    def nothing(history, starts, logits):
        return torch.full_like(logits, value)

    run = fakes.build_run(
        fakes.TableTarget(law, law, torch.tensor([[0, 1]])), new_tokens=4, do_sample=True,
        process=nothing,
    )  # fmt: skip
    with pytest.raises(ValueError, match="row 0 has no possible token after 2"):
        run.run()


@pytest.mark.parametrize("end", [5, 6, 7])
def test_a_row_that_ran_ahead_to_its_dead_end_waits_for_the_batch(fakes, end):
    """Row 0 is at its end token, of length 5, after one round; row 1 gains a token a round."""
    p, q = torch.full((2, 8, 8, 8), -30.0)
    for now, then in ((4, 5), (5, END), (6, 7), (7, 6)):
        p[:, now, then] = 30.0
        q[:, now, then if now < 6 else now] = 30.0
    stop = fakes.EndRule(99, pads=False, together=lambda ids, n: [n >= end] * 2)
    run = fakes.build_run(
        fakes.TableTarget(p, q, torch.tensor([[0, 1, 4], [0, 1, 6]])), k=4, new_tokens=20,
        do_sample=True, process=grammar, strategy="streaming", stop=stop,
    )  # fmt: skip
    if end <= 5:
        assert run.run().sequences.tolist() == [[0, 1, 4, 5, END], [0, 1, 6, 7, 6]]
        return
    with pytest.raises(ValueError, match="row 0 has no possible token after 5"):
        run.run()
    assert run.history.lengths[1] == 5  # not before plain decoding would have got there


def test_a_dead_end_past_the_length_limit_is_never_met(fakes):
    """Token 1 follows 0, and the end token, which does not stop this run, follows 1 at the cap."""
    p = torch.full((4, 4, 4), -30.0)
    p[:, 0, 1] = p[:, 1, END] = p[:, END, 0] = 30.0
    run = fakes.build_run(
        fakes.TableTarget(p, p, torch.tensor([[0, 0]])), k=4, new_tokens=2, do_sample=True,
        process=grammar, strategy="streaming",
    )  # fmt: skip
    assert run.run().sequences.tolist() == [[0, 0, 1, END]]
