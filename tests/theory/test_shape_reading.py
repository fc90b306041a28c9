"""Shapes from configs, dicts and models agree; what is approximate says so."""

from __future__ import annotations

import pytest
import torch

from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.shape_reading import shape_from_config, shape_from_model


def test_config_object_and_its_dict_give_one_shape(tiny_model, family):
    config = tiny_model(family).config
    from_object = shape_from_config(config)
    values = {**config.to_dict(), "dtype": "float32"}
    if getattr(config, "layer_types", None):
        values["layer_types"] = config.layer_types
    assert shape_from_config(values) == from_object


def test_a_model_brings_its_own_weights(tiny_model, family):
    model = tiny_model(family)
    by_rule, counted = shape_from_config(model.config), shape_from_model(model)
    assert counted.layers == by_rule.layers
    assert counted.weights.total == sum(p.numel() for p in model.parameters())
    assert counted.resident_bytes == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_model_brings_the_widths_of_its_own_weights(tiny_model):
    model = tiny_model("llama")
    model.lm_head.to(torch.float16)
    shape = shape_from_model(model)
    assert 2 < shape.weight_bytes < 4
    assert shape.resident_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert shape.kv_bytes == 4


def test_the_cache_is_as_large_as_the_one_of_transformers(tiny_model, family):
    """Bytes of a full-length dynamic cache after 12 tokens, below every window."""
    model = tiny_model(family)
    with torch.no_grad():
        output = model(torch.arange(1, 13)[None], use_cache=True)
    cache = output.get("cache", output.get("past_key_values"))
    held = sum(
        t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values)
    )
    assert shape_from_model(model).with_bytes(kv_bytes=4).cache_bytes(12) == held


def test_the_latent_cache_is_as_large_as_the_one_of_transformers():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "minicpm3",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(torch.arange(1, 13)[None], use_cache=True)
    cache = output.get("cache", output.get("past_key_values"))
    held = sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values))
    latent, full = 16 + 4, 4 * (8 + 4 + 8)
    assert held in (2 * 12 * latent, 2 * 12 * full)
    if held != 2 * 12 * latent:
        pytest.skip("this version of transformers caches expanded keys and values")
    for mla in ("latent", "expanded"):
        shape = shape_from_config(config, mla=mla).with_bytes(kv_bytes=1)
        assert shape.cache_bytes(12) == held


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("SmolLM2-135M", 0.1345, 0.1345),
        ("Qwen3-1.7B", 1.72, 1.72),
        ("Qwen3-8B", 8.19, 7.57),
        ("Qwen3-14B", 14.77, 13.99),
        ("Qwen3-32B", 32.76, 31.98),
        ("Qwen3-30B-A3B", 30.53, 3.04),
        ("Llama-3.1-8B", 8.03, 7.50),
        ("Llama-3.1-70B", 70.55, 69.50),
        ("gpt-oss-20b", 20.91, 3.61),
        ("DeepSeek-V3", 671.03, 36.62),
    ],
)
def test_published_sizes(name, billions, active):
    """Totals are those of the model cards; the active count leaves the input table out."""
    shape = shape_from_config(KNOWN_MODELS[name])
    assert shape.weights.total / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.weights.active_per_token / 1e9 == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "cached"),
    [("Qwen3-1.7B", 114688), ("Qwen3-8B", 147456), ("Qwen3-14B", 163840), ("Llama-3.1-8B", 131072)],
)
def test_published_bytes_of_cache_per_token(name, cached):
    assert shape_from_config(KNOWN_MODELS[name]).kv_bytes_per_token == cached


def test_a_page_of_the_papers_offload():
    """36 layers x 8 heads x 128 x 2 bytes, keys and values, 128 tokens."""
    shape = shape_from_config(KNOWN_MODELS["Qwen3-8B"])
    assert shape.cache_bytes(128) == 18_874_368


def test_families_that_rules_miss_are_noted_until_they_are_counted():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("zamba2")
    notes = shape_from_config(config).notes
    assert any("approximate by rule" in note for note in notes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    notes = shape_from_model(model).notes
    assert not any("by rule" in note for note in notes)
    assert any("counted once" in note for note in notes)


def test_layers_with_settings_of_their_own():
    """Gemma 4: full layers have wider heads, and the last layers share caches."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no gemma4")
    config = AutoConfig.for_model("gemma4_text", num_kv_shared_layers=10)
    shape = shape_from_config(config)
    widths = {(layer.kind, layer.attend_flops // layer.query_heads // 4) for layer in shape.layers}
    assert len(widths) == 2
    assert sum(layer.shared for layer in shape.layers) == 10
