"""The exact law adds up, true samplers pass and faulty ones do not."""

from __future__ import annotations

import math

import pytest
import torch

from pillarattn.evaluation.sampling_law import cut_at_end, exact_law, law_z_score

VOCAB = 5


@pytest.fixture
def table():
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def next_logits(table):
    return lambda ids: table[ids[:, -1]]


def draw(table, count, *, steps=3, temperature=1.0):
    token = torch.zeros(count, dtype=torch.int64)
    rows = []
    for _ in range(steps):
        token = (table[token] / temperature).softmax(-1).multinomial(1).squeeze(1)
        rows.append(token)
    return torch.stack(rows, dim=1).tolist()


def test_the_law_is_the_product_of_conditionals(table, next_logits):
    law = exact_law(next_logits, torch.tensor([0]), new_tokens=2)
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    assert len(law) == VOCAB**2
    probs = table.softmax(-1)
    assert law[(3, 1)] == pytest.approx(float(probs[0, 3] * probs[3, 1]), rel=1e-5)


def test_an_end_token_ends_an_outcome(next_logits):
    law = exact_law(next_logits, torch.tensor([0]), new_tokens=3, eos_token_ids=[2])
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    assert (2,) in law
    assert all(2 not in outcome[:-1] for outcome in law)


def test_a_processor_shapes_every_step(next_logits):
    def ban_one(ids, logits):
        return logits.index_fill(1, torch.tensor([1]), -math.inf)

    law = exact_law(next_logits, torch.tensor([0]), new_tokens=2, processor=ban_one)
    assert all(1 not in outcome for outcome in law)
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)


def test_rare_outcomes_are_one_group(next_logits, table):
    whole = exact_law(next_logits, torch.tensor([0]), new_tokens=3)
    part = exact_law(next_logits, torch.tensor([0]), new_tokens=3, min_probability=0.01)
    assert part == {o: p for o, p in whole.items() if p > 0.01}
    assert law_z_score(draw(table, 4000), part).z < 4


def test_a_true_sampler_scores_low(next_logits, table):
    law = exact_law(next_logits, torch.tensor([0]), new_tokens=3)
    result = law_z_score(draw(table, 5000), law)
    assert result.z < 4
    assert result.p_value > 1e-4
    assert result.draws == 5000
    assert result.degrees == result.cells - 1


@pytest.mark.parametrize("temperature", [0.8, 1.25])
def test_a_wrong_temperature_scores_high(next_logits, table, temperature):
    law = exact_law(next_logits, torch.tensor([0]), new_tokens=3)
    assert law_z_score(draw(table, 5000, temperature=temperature), law).z > 10


def test_an_impossible_outcome_is_proof():
    result = law_z_score([(0,)] * 999 + [(7,)], {(0,): 0.5, (1,): 0.5})
    assert result.z == math.inf
    assert result.impossible == 1


def test_one_cell_says_nothing():
    assert law_z_score([(0,)] * 50, {(0,): 1.0}).z == 0


def test_the_statistic_is_pearsons():
    result = law_z_score([(0,)] * 60 + [(1,)] * 40, {(0,): 0.5, (1,): 0.5})
    assert result.statistic == pytest.approx(4.0)
    assert result.z == pytest.approx(3 / math.sqrt(2))
    assert result.p_value == pytest.approx(0.0455, abs=1e-4)


def test_no_draws_is_an_error():
    with pytest.raises(ValueError, match="at least one draw"):
        law_z_score([], {(0,): 1.0})


def test_cutting_keeps_the_end_token():
    assert cut_at_end([3, 2, 0, 0], [2]) == (3, 2)
    assert cut_at_end([3, 4], [2]) == (3, 4)
