"""The length that pays best: by the formula, and learned from rounds."""

from __future__ import annotations

import pytest
import torch

from pillarattn.decoding.draft_length import DRAFT_LENGTHS, AcceptanceLength, ConstantLength


def best(a, cost, k):
    """Return the best length by simulating expected tokens term by term."""
    value = {}
    for length in range(1, k + 1):
        tokens = 1.0
        for i in range(1, length + 1):
            tokens += a**i
        value[length] = tokens / (1 + cost * length)
    return max(value, key=lambda n: (round(value[n], 12), -n))


@pytest.mark.parametrize("accepted", [0, 1, 4, 9])
@pytest.mark.parametrize("cost", [0.05, 0.3, 2.0])
def test_it_maximises_tokens_per_cost(accepted, cost):
    policy = AcceptanceLength(cost, memory=0.0, prior=0.5)
    # One round of ten rows, of which `accepted` rows got one token and the others none.
    policy.observe([1] * 10, [1] * accepted + [0] * (10 - accepted))
    assert policy.estimate == pytest.approx(accepted / 10)
    for k in (1, 4, 16):
        assert policy.choose(k) == best(accepted / 10, cost, k)


def test_the_estimate_moves_with_the_text_and_forgets():
    policy = AcceptanceLength(0.2)
    first = policy.choose(8)
    for _ in range(40):
        policy.observe([8, 8], [0, 0])
    assert policy.estimate < 0.02 and policy.choose(8) == 1
    for _ in range(40):
        policy.observe([1, 1], [1, 1])
    assert policy.estimate > 0.9 and policy.choose(8) == 8
    assert policy.fresh().choose(8) == first and policy.choose(8) == 8


def test_full_drafts_are_no_rejection_and_empty_rounds_teach_nothing():
    policy = AcceptanceLength(memory=0.0)
    policy.observe([3, 2, 0], [3, 1, 0])
    assert policy.estimate == 4 / 5
    policy.observe([0, 0], [0, 0])
    policy.observe([], [])
    assert policy.estimate == 4 / 5


@pytest.mark.parametrize(
    ("options", "name"),
    [({"draft_cost": 0}, "draft_cost"), ({"memory": 1}, "memory"), ({"prior": 1}, "prior")],
)
def test_bad_arguments_are_refused(options, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        AcceptanceLength(**options)


def test_constant_is_k():
    policy = DRAFT_LENGTHS.get("constant")()
    assert isinstance(policy, ConstantLength)
    policy.observe([8], [0])
    assert policy.choose(5) == 5 and policy.goes_on(torch.zeros(1, 4)) is None


def test_a_run_drafts_less_where_drafts_fail(fakes):
    # Drafts are always wrong for this law.
    p, q = torch.full((4, 4, 4), -30.0), torch.full((4, 4, 4), -30.0)
    p[..., 1], q[..., 2] = 30.0, 30.0
    runs = {}
    for name in ("constant", "acceptance"):
        run = fakes.build_run(
            fakes.TableTarget(p, q, torch.tensor([[0, 1]])), k=8, new_tokens=40,
            strategy="streaming", draft_length=name,
        )  # fmt: skip
        assert run.run().sequences.tolist() == [[0] + [1] * 41]
        runs[name] = run.stats
    assert runs["acceptance"].rounds == runs["constant"].rounds
    assert runs["acceptance"].drafted < 0.3 * runs["constant"].drafted
