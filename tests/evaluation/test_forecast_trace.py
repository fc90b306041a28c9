"""A trace notes what the forecast learnt and kept, and changes nothing."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.evaluation.forecast_trace import HeadRounds, trace_forecast
from pillarattn.evaluation.probe import acceptance_probe


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, 97, (140,), generator=torch.Generator().manual_seed(0))


def config(**options):
    options = {"k": 4, "s": 0.1, "min_budget": 10, "recent": 5, "sink": 0, **options}
    return pillarattn.PillarConfig(**{"strategy": "forecast", **options})


def test_watching_changes_nothing_and_notes_every_choice(tiny_model, ids):
    model = tiny_model("llama")
    trace = trace_forecast(model, ids, config(), start=60)
    plain = acceptance_probe(model, ids, config(), start=60)[0]
    assert trace.record["mean_accepted"] == plain["mean_accepted"]
    rounds = plain["rounds"]
    assert trace.lengths == [60 + 5 * n for n in range(rounds)]
    assert trace.layers == [0, 1] and len(trace.features) == 10
    assert trace.weights.shape == (rounds, 2, 2, 10) and trace.counts.shape == (rounds, 2, 2)
    # One pool: what one head has more, others have less.
    budgets = torch.tensor([max(10, -(-n // 10)) for n in trace.lengths])
    assert torch.equal(trace.counts.sum(dim=(1, 2)), 4 * budgets)
    assert not torch.equal(trace.weights[0], trace.weights[-1])
    assert sorted(trace.heads) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for (layer, head), found in trace.heads.items():
        assert torch.equal(found.kept.sum(dim=1), trace.counts[:, layer, head])
        assert found.mass.shape == found.forecast.shape == (rounds, trace.lengths[-1])
        assert 0 < found.caught() < 1
        for row, length in enumerate(trace.lengths):
            assert found.kept[row, length - 5 : length].all()
            assert not found.kept[row, length:].any()


def test_what_drafts_had_read_is_the_last_choice_and_what_came_since():
    kept = torch.tensor([[True, False, True, False], [False, True, True, True]])
    mass = torch.tensor([[0.5, 0.2, 0.3, 0.0], [0.4, 0.3, 0.2, 0.1]]).half()
    rounds = HeadRounds(mass, mass, kept, [3, 4])
    assert rounds.read().tolist() == [[True, False, True, True]]
    assert rounds.caught() == pytest.approx(0.7, abs=1e-3)
    with pytest.raises(ValueError, match="one choice was traced"):
        HeadRounds(mass[:1], mass[:1], kept[:1], [3]).caught()


def test_heads_may_be_named_and_the_heaviest_found(tiny_model, ids):
    options = config(strategy={"name": "forecast", "features": ["now", "left_1"]})
    trace = trace_forecast(tiny_model("llama"), ids, options, start=60, heads=[(1, 0)])
    assert list(trace.heads) == [(1, 0)]
    layer, head = trace.heaviest("left_1")
    assert trace.weights[-1, layer, head, 1] == trace.weights[-1, ..., 1].max()
    with pytest.raises(ValueError, match="feature must be one of now, left_1, got 'match'"):
        trace.heaviest("match")


def test_wrong_arguments_are_named(tiny_model, ids):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="follows strategy 'forecast', got 'pillar'"):
        trace_forecast(model, ids, config(strategy="pillar"), start=60)
    with pytest.raises(ValueError, match=r"heads has \(7, 0\); .* layers \[0, 1\] of 2 KV"):
        trace_forecast(model, ids, config(), start=60, heads=[(7, 0)])
