"""`compare` runs both ways, times both, and judges the tokens of those very runs."""

from __future__ import annotations

import json

import pytest
import torch

import pillarattn
from pillarattn.evaluation.comparison import compare


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def inputs():
    ids = torch.randint(1, 97, (1, 24))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pillar(**options):
    return pillarattn.SelfSpeculativeGenerator(k=4, s=0.1, **{"min_budget": 8, **options})


def test_both_runs_are_measured(model, inputs):
    calls = []
    result = compare(model, inputs, pillar(), max_new_tokens=12, streamer_for=calls.append)
    assert calls == ["plain", "speculative"]
    assert result.lossless.lossless
    assert result.plain.new_tokens == result.speculative.new_tokens == len(result.tokens) == 12
    assert result.stats["emitted"] == 11
    assert result.decode_speedup > 0
    assert result.total_speedup > 0
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert result.tokens == plain[0, 24:].tolist()


def test_it_becomes_json(model, inputs):
    values = json.loads(json.dumps(compare(model, inputs, pillar(), max_new_tokens=4).to_dict()))
    assert values["config"]["k"] == 4
    assert values["environment"]["versions"]["torch"] == torch.__version__
    assert values["lossless"]["lossless"] is True


def test_without_plain_nothing_is_claimed(model, inputs):
    result = compare(model, inputs, pillar(), max_new_tokens=4, plain=False)
    assert result.plain is result.lossless is result.decode_speedup is result.total_speedup is None
    json.dumps(result.to_dict())


def test_seeded_sampling_is_compared(model, inputs):
    result = compare(model, inputs, pillar(seed=3), max_new_tokens=12, do_sample=True)
    assert result.lossless.lossless
    assert result.lossless.mode == "seeded"


def test_unseeded_sampling_is_not(model, inputs):
    assert compare(model, inputs, pillar(), max_new_tokens=4, do_sample=True).lossless is None
