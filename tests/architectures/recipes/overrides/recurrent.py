"""Overrides of families with recurrent states or short convolutions."""

from __future__ import annotations

from typing import Any

from tests.architectures.recipes.fields import HEAD_DIM, WINDOW
from tests.architectures.recipes.shrink import KEEP

_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
}
_HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
# Their block pass clamps time steps from below by `time_step_min`, their single step does not: with
# any smaller step the two disagree, in stock transformers too. Tiny, so that nothing is clamped.
_NO_CLAMP = {"time_step_min": 1e-12, "time_step_floor": 1e-3}

RECURRENT: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "attention_multiplier": HEAD_DIM**-0.5,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": _NO_CLAMP,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        **_HYBRID,
        "attention_hidden_size": KEEP,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
    },
    "zamba2": {**_HYBRID, "adapter_rank": 8, **_NO_CLAMP},
    "zaya": {
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": WINDOW,
        "head_dim": HEAD_DIM,
        "router_hidden_size": 16,
    },
}
