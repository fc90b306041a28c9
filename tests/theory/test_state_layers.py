"""Recurrent state: the rules against the caches that transformers really makes."""

from __future__ import annotations

import pytest
import torch

from pillarattn.theory.config_fields import ConfigFields
from pillarattn.theory.layer_shapes import layer_shapes

SMALL = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
}
FAMILIES = {
    "qwen3_5_text": {**SMALL, **DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "bamba": {
        **SMALL,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "attn_layer_indices": [1],
    },
    "lfm2": {**SMALL, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "jamba": {
        **SMALL,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
}


def tensors_of(value):
    """Yield every tensor in an attribute that may hold one, or a list or dict of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_state_is_what_the_cache_of_transformers_holds(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(torch.arange(1, 9)[None], use_cache=True)
    cache = output.get("cache", output.get("past_key_values"))
    held = sum(
        tensor.numel()
        for name in ("conv_states", "recurrent_states")
        for tensor in tensors_of(getattr(cache.layers[0], name, None))
    )
    layers, notes = layer_shapes(ConfigFields(config))
    assert notes == []
    assert held > 0
    assert [layers[0].state, layers[1].state] == [held, 0]
