"""Layers from configs: grouped heads, latents, windows, indexers, and what no rule knows."""

from __future__ import annotations

import pytest

from pillarattn.theory.config_fields import ConfigFields
from pillarattn.theory.layer_shapes import layer_shapes

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT = {
    **BASE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}


def layers_of(mla="latent", **settings):
    return layer_shapes(ConfigFields({**BASE, **settings}), mla)[0]


def test_grouped_heads():
    layer = layers_of()[0]
    assert (layer.kind, layer.query_heads, layer.kv_heads) == ("full", 4, 2)
    assert layer.stored == layer.read == 2 * 2 * 16
    assert layer.key_values == 2 * 16
    # A score and a weighted sum: one multiply and one add for each of 4 heads and 16 + 16 values.
    assert layer.attend_flops == 2 * 4 * 32


def test_head_counts_and_widths_of_older_families():
    assert layers_of(num_key_value_heads=None)[0].kv_heads == 4
    assert layers_of(head_dim=32)[0].stored == 2 * 2 * 32
    multi = layers_of(model_type="gpt_bigcode", num_key_value_heads=None, multi_query=True)
    assert multi[0].kv_heads == 1
    old = {"model_type": "falcon", "num_key_value_heads": None, "num_kv_heads": 4}
    assert layers_of(**old, multi_query=True)[0].kv_heads == 1
    new = layers_of(**{**old, "num_kv_heads": 2}, multi_query=True, new_decoder_architecture=True)
    assert new[0].kv_heads == 2


def test_values_may_be_narrower_than_keys():
    layer = layers_of(head_dim=24, v_head_dim=16)[0]
    assert layer.stored == 2 * (24 + 16)
    assert layer.key_values == 2 * 24


def test_latents_are_read_as_they_are_cached():
    layer = layer_shapes(ConfigFields(LATENT), "latent")[0][0]
    assert layer.stored == layer.read == 32 + 8
    assert (layer.kv_heads, layer.scanned, layer.expanded) == (1, 0, 0)
    # Queries against latent and rotary values, weights against latents, for 4 heads.
    assert layer.attend_flops == 2 * 4 * (40 + 32)


def test_the_reading_of_latents_is_noted():
    notes = layer_shapes(ConfigFields(LATENT), "latent")[1]
    assert len(notes) == 1 and "mla='expanded'" in notes[0]
    assert layer_shapes(ConfigFields(LATENT), "expanded")[1] == []


def test_expanding_latents_reads_and_writes_the_whole_cache():
    layer = layer_shapes(ConfigFields(LATENT), "expanded")[0][0]
    full = 4 * (16 + 8 + 12)
    assert (layer.stored, layer.scanned, layer.read, layer.expanded) == (40, 40, full, full)
    assert layer.expand_flops == 2 * 32 * 4 * (16 + 12)
    assert layer.attend_flops == 2 * full


def test_indexed_layers_scan_small_keys_and_attend_few():
    settings = {**LATENT, "layer_types": ["indexed_attention"] * 4}
    settings |= {"index_topk": 100, "index_head_dim": 6, "index_n_heads": 3}
    layer = layer_shapes(ConfigFields(settings), "latent")[0][0]
    assert (layer.kind, layer.read_limit) == ("indexed", 100)
    assert (layer.stored, layer.scanned, layer.scan_flops) == (46, 6, 2 * 3 * 6)
    assert layer.keys_read(1000, 1) == 100


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, "ffff"),
        ({"sliding_window": 8}, "wwww"),
        ({"sliding_window": 8, "use_sliding_window": False}, "ffff"),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, "wfwf"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}, "wfwf"),
        ({"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 8}, "wwww"),
        ({"layer_types": ["full_attention", "mlp", "moe", "attention"]}, "fnnf"),
        ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}, "nfnf"),
        ({"attn_layer_indices": [3], "mamba_n_heads": 2, "mamba_d_head": 4}, "nnnf"),
    ],
)
def test_which_layer_attends_how(settings, kinds):
    layers = layers_of(**settings)
    assert "".join(layer.kind[0] for layer in layers) == kinds
    assert all(layer.window == 8 for layer in layers if layer.kind == "window")
    if "mamba_d_state" in settings or "mamba_n_heads" in settings:
        assert all(bool(layer.state) == (layer.kind == "none") for layer in layers)


def test_shared_caches_store_nothing():
    layers = layers_of(num_kv_shared_layers=2)
    assert [layer.shared for layer in layers] == [False, False, True, True]


def test_windows_may_have_heads_of_their_own():
    settings = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    layers = layers_of(**settings, head_dim=8, swa_num_key_value_heads=4, swa_head_dim=4)
    assert [layer.stored for layer in layers[:2]] == [2 * 4 * 4, 2 * 2 * 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["moon"] * 4}, "layer type 'moon' of model type 'llama' is unknown"),
        ({"layer_types": ["sliding_attention"] * 4}, "needs sliding_window"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_what_cannot_be_read_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        layers_of(**settings)


def test_an_unknown_reading_of_latents_is_refused():
    with pytest.raises(ValueError, match="mla must be one of latent, expanded, got 'both'"):
        layers_of(mla="both")


def test_a_state_that_no_rule_knows_is_noted():
    layers, notes = layer_shapes(ConfigFields({**BASE, "layer_types": ["recurrent"] * 4}))
    assert notes == ["recurrent state of llama is not counted"]
    assert not any(layer.state for layer in layers)
