"""Prompts in every form, and seeds of samples."""

from __future__ import annotations

import pytest
import torch

from pillarattn.engine.prompts import eos_tokens, sample_seed, token_ids


@pytest.mark.parametrize(
    "prompt", [[5, 6], (5, 6), torch.tensor([5, 6]), torch.tensor([[5, 6]]), range(5, 7)]
)
def test_every_form_of_ids(prompt):
    assert token_ids(prompt, None) == [5, 6]


def test_text_goes_through_the_tokenizer(letters):
    assert token_ids("ab", letters) == letters("ab")["input_ids"]


def test_end_tokens_are_the_generation_configs(tiny_model):
    model = tiny_model("llama")
    assert eos_tokens(model) == frozenset()
    model.generation_config.eos_token_id = 7
    assert eos_tokens(model) == {7}
    model.generation_config.eos_token_id = [7, 8]
    assert eos_tokens(model) == {7, 8}


def test_the_first_sample_has_the_requests_own_seed():
    seeds = [sample_seed(5, i) for i in range(1000)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(None, 3) is None
