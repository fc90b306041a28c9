"""Every recipe builds a model whose text is finite, repeatable, varied and bound to context."""

from __future__ import annotations

import os
import random

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tests.architectures.recipes import (
    CannotBuild,
    build,
    config_of,
    decoder_only_types,
    model_types,
    multimodal_types,
    notes,
)
from tests.architectures.recipes.fields import KV_HEADS, VOCAB, WINDOW

_SAMPLE = 40
_PROMPT = 20
_NEW = 6
# XLM predicts from a mask token that it appends; that token outweighs the prompt.
_SAME_TOKEN = {"xlm"}


def _types() -> list[str]:
    everything = model_types() + multimodal_types()
    if os.environ.get("PILLARATTN_ALL_ARCHITECTURES") == "1":
        return everything
    return sorted(random.Random(0).sample(everything, _SAMPLE))


def _prompts(count: int = 3, length: int = _PROMPT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCAB, (count, length), generator=generator)


def _continue(model: PreTrainedModel, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.stack(out.logits)


def _last_logits(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=prompt[None], use_cache=False).logits[0, -1]


@pytest.mark.parametrize("model_type", _types())
def test_generates_finite_repeatable_varied_text(model_type: str) -> None:
    if notes(model_type):
        with pytest.raises(CannotBuild, match=model_type):
            build(model_type)
        return
    model = build(model_type)
    assert not model.training
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float32}
    texts = []
    for prompt in _prompts():
        text, logits = _continue(model, prompt)
        assert len(text) == _NEW
        assert torch.isfinite(logits).all()
        texts.append(text)
    assert _continue(model, _prompts()[0])[0] == texts[0]
    if model_type not in _SAME_TOKEN:
        assert len({token for text in texts for token in text}) > 2, texts
        assert len({tuple(text) for text in texts}) == len(texts), texts


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_next", "deepseek_v3", "qwen2_vl"])
def test_seed_decides_every_weight(model_type: str) -> None:
    first, again, other = (build(model_type, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    embedding = next(name for name in first if "embed" in name or "wte" in name)
    assert not torch.equal(first[embedding], other[embedding])


def test_build_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build("llama")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("model_type", ["musicgen", "musicgen_melody"])
def test_a_type_without_text_says_why(model_type: str) -> None:
    assert "audio" in (notes(model_type) or "")
    with pytest.raises(CannotBuild, match=f"{model_type}: .*audio"):
        build(model_type)


def test_groups_of_types_are_subsets() -> None:
    assert set(decoder_only_types()) < set(model_types())
    assert not set(multimodal_types()) & set(model_types())
    assert len(multimodal_types()) == 12
    assert not any(notes(name) for name in decoder_only_types())
    if transformers.__version__.startswith("5.24."):
        assert (len(model_types()), len(decoder_only_types())) == (196, 139)


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        ("llama4_text", {"chunked_attention", "full_attention"}),
        ("qwen2", {"sliding_attention", "full_attention"}),
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("bamba", {"linear_attention", "full_attention"}),
        ("lfm2", {"conv", "full_attention"}),
    ],
)
def test_a_pattern_holds_every_kind_of_layer(model_type: str, kinds: set[str]) -> None:
    config = config_of(model_type)
    assert set(config.layer_types) == kinds
    assert len(config.layer_types) == config.num_hidden_layers


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gpt_oss", "falcon_h1"])
def test_grouped_families_have_groups(model_type: str) -> None:
    config = config_of(model_type)
    assert config.num_key_value_heads == KV_HEADS
    assert config.num_attention_heads >= 2 * KV_HEADS


def test_window_hides_what_lies_before_it() -> None:
    model = build("mistral")  # two layers, each with a window
    prompt = _prompts(1, 60)[0]
    far, near = prompt.clone(), prompt.clone()
    far[: 60 - 2 * WINDOW] = 3
    near[-WINDOW:-1] = 3
    logits = _last_logits(model, prompt)
    assert torch.equal(_last_logits(model, far), logits)
    assert (_last_logits(model, near) - logits).abs().max() > 1


@pytest.mark.parametrize("model_type", ["llama", "bert", "gpt2", "deepseek_v3", "gemma2"])
def test_far_tokens_matter_under_full_attention(model_type: str) -> None:
    model = build(model_type)
    prompt = _prompts(1, 60)[0]
    changed = prompt.clone()
    changed[:8] = 3
    gap = (_last_logits(model, changed) - _last_logits(model, prompt)).abs().max()
    assert gap > 0.1
