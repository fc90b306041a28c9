"""The tiny models and the NaN fill do what the other tests rely on."""

from __future__ import annotations

import pytest
import torch


def greedy(model, prompt, new_tokens=40):
    return model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)[:, prompt.shape[1] :]


def test_greedy_text_of_a_family_is_varied(tiny_model, family):
    model = tiny_model(family)
    text = greedy(model, torch.tensor([[5, 17, 42, 8]]))
    assert text.shape == (1, 40)
    assert text.unique().numel() >= 8


def test_a_family_is_fp32_in_eval_mode_and_finite(tiny_model, family):
    model = tiny_model(family)
    assert not model.training
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    assert model.config.pad_token_id == 0
    assert model.generation_config.eos_token_id is None
    assert model.config.num_hidden_layers == (4 if family == "gemma2" else 2)


def test_the_same_arguments_give_the_same_weights_and_leave_the_global_generator(tiny_model):
    before = torch.get_rng_state()
    first, second, other = (tiny_model("llama", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    weights, same, different = (model.lm_head.weight for model in (first, second, other))
    assert weights is not same
    assert torch.equal(weights, same)
    assert not torch.equal(weights, different)


def test_overrides_reach_the_config(tiny_model):
    model = tiny_model("mistral", sliding_window=None, attn_implementation="eager")
    assert model.config.sliding_window is None
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("window", ["mistral", "gemma2"])
def test_the_window_of_a_windowed_family_matters(tiny_model, window):
    prompt = torch.randint(1, 97, (1, 60))
    narrow, wide = (tiny_model(window, sliding_window=size) for size in (16, 512))
    assert not torch.equal(greedy(narrow, prompt), greedy(wide, prompt))


def test_uninitialised_memory_is_nan():
    assert torch.empty(1000).isnan().all()
    assert torch.empty_like(torch.zeros(4, 4, dtype=torch.bfloat16)).isnan().all()
    assert torch.zeros(1).new_empty(5).isnan().all()
    assert (torch.empty(8, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


@pytest.mark.raw_memory
def test_raw_memory_opts_out():
    assert not torch.are_deterministic_algorithms_enabled()
