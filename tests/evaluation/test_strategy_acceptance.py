"""Strategies are compared on one text, and sharing the prefill does not change that text."""

from __future__ import annotations

import pytest
import torch

from pillarattn import PillarConfig
from pillarattn.errors import UnknownNameError
from pillarattn.evaluation.strategy_acceptance import strategy_acceptance

CONFIG = PillarConfig(k=4, s=0.1, min_budget=8)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_every_strategy_is_measured(tiny_model, family):
    ids = torch.randint(1, 97, (1, 40))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    seen = []
    records = strategy_acceptance(
        tiny_model(family),
        inputs,
        CONFIG,
        ["pillar", "full"],
        max_new_tokens=11,
        on_strategy=seen.append,
    )
    assert seen == [r["strategy"] for r in records] == ["pillar", "full"]
    assert records[1]["acceptance_rate"] == 1.0
    assert records[0]["keys_read_per_draft_step"] < records[1]["keys_read_per_draft_step"]
    assert all(r["max_new_tokens"] == 11 for r in records)


def test_a_prompt_of_one_token_will_do(tiny_model):
    inputs = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1)}
    records = strategy_acceptance(tiny_model("llama"), inputs, CONFIG, ["full"], max_new_tokens=4)
    assert records[0]["rounds"] >= 1


def test_bad_input_is_refused(tiny_model):
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(UnknownNameError, match="unknown strategy 'best'"):
        strategy_acceptance(tiny_model("llama"), {"input_ids": ids}, CONFIG, ["best"])
    with pytest.raises(ValueError, match="one prompt"):
        strategy_acceptance(tiny_model("llama"), {"input_ids": ids}, CONFIG, ["full"])
