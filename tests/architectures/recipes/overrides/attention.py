"""Overrides of decoder families by their attention: windows, latents, indexers, experts."""

from __future__ import annotations

from typing import Any

from tests.architectures.recipes.fields import HEAD_DIM, WINDOW

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_MIXED = {"layer_types": [_SLIDING, _FULL] * 2, "num_hidden_layers": 4, "sliding_window": WINDOW}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ROPE_BY_KIND = {"rope_parameters": {_FULL: {**_ROPE, "rope_theta": 50_000.0}, _SLIDING: _ROPE}}
# Rotary sections (height, width, time) that fill half a head.
_SECTIONS = {**_ROPE, "mrope_section": [3, 3, 2]}
# Qwen's configurations window the layers from `max_window_layers` on.
_QWEN = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
}
# Keys and values of the last two layers come from the first two.
_GEMMA_SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
_GEMMA4_HEADS = {"global_head_dim": 32}
_GEMMA3N = {**_GEMMA_SHARED, "laurel_rank": 8, "altup_num_inputs": 2}
# Window layers of their own latent shape.
_DOTS3 = {
    "head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 20,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 12,
}
_INKLING = {"rel_extent": 32, "d_rel": 8, "log_scaling_n_floor": 16}
_INKLING2 = {**_INKLING, "n_layers_per_attn_res_block": 1}
_LLAMA4 = {
    "no_rope_layers": [1, 0, 1, 0],
    "interleave_moe_layer_step": 2,
    "floor_scale": WINDOW,
}

# The default of 1 would make every softmax pick one key.
_GRANITE = {"attention_multiplier": HEAD_DIM**-0.5}

ATTENTION: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {**_MIXED, "rope_parameters": {_FULL: _SECTIONS, _SLIDING: _SECTIONS}},
    # The attention part reads a field that its class does not declare, and clips always.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "index_topk": 4,
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {
        **_QWEN,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "mlp_layer_types": ["dense"] * 2,
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config": {
            "adapter_input_size": 64,
            "adapter_out_dim": 64,
            "downsample_hidden_size": 8,
        },
    },
    "dots3_note_text": _DOTS3,
    "gemma2": {"attn_logit_softcapping": 20.0},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": {**_GEMMA_SHARED, **_GEMMA4_HEADS}},
    "gemma4_text": {**_GEMMA_SHARED, **_GEMMA4_HEADS},
    "gemma4_unified": {"text_config": {**_GEMMA4_HEADS, "num_kv_shared_layers": 2}},
    "gemma4_unified_text": {**_GEMMA4_HEADS, "num_kv_shared_layers": 2},
    "got_ocr2": {"text_config": _QWEN, "vision_config": {"image_size": 32, "mlp_dim": 64}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granite": _GRANITE,
    "granite_swa": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "inkling2_loop_text": {**_INKLING2, "loop_layer_index_start": 1, "loop_layer_index_end": 3},
    "inkling2_text": _INKLING2,
    "inkling_text": _INKLING,
    "laguna": {**_MIXED, **_ROPE_BY_KIND},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "longcat_flash": {"zero_expert_num": 2},
    "mellum": {**_MIXED, **_ROPE_BY_KIND},
    "minimax_m3_vl_text": {"rotary_dim": 8},
    "ministral": {**_MIXED, "head_dim": HEAD_DIM},
    "moss_transcribe_diarize": {"text_config": _QWEN},
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN,
    "vaultgemma": {"attn_logit_softcapping": 20.0},
}
