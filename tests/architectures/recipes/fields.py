"""Tiny values by the name of a configuration field: one table for every family."""

from __future__ import annotations

from typing import Any

VOCAB = 101
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
WINDOW = 16
MAX_POSITIONS = 512


def _each(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


# A field is set only where the configuration class has it. What is absent here keeps its default.
TINY: dict[str, Any] = {
    **_each(VOCAB, "vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"),
    **_each(VOCAB, "unpadded_vocab_size"),
    **_each(HIDDEN, "hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "lru_width"),
    **_each(HIDDEN, "embedding_size", "input_embedding_size", "output_embedding_size"),
    **_each(HIDDEN, "word_embed_proj_dim", "attention_hidden_size", "dim_model_base"),
    **_each(MAX_POSITIONS, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    **_each(MAX_POSITIONS, "context_length", "max_target_positions"),
    **_each(64, "original_max_position_embeddings", "max_source_positions"),
    # Depth: the families with a pattern of layer kinds get theirs from LAYERS_OF_A_PATTERN.
    **_each(2, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"),
    **_each(2, "decoder_layers", "encoder_layers", "num_encoder_layers", "num_decoder_layers"),
    **_each(HEADS, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    **_each(HEADS, "decoder_attention_heads", "encoder_attention_heads"),
    **_each(HEADS, "num_encoder_attention_heads", "num_decoder_attention_heads"),
    **_each(HEADS, "swa_num_attention_heads"),
    **_each(KV_HEADS, "num_key_value_heads", "num_kv_heads", "kv_n_heads"),
    **_each(KV_HEADS, "swa_num_key_value_heads"),
    **_each(HEAD_DIM, "head_dim", "swa_head_dim", "kv_channels", "d_head", "attention_head_size"),
    **_each(HEAD_DIM, "dim_head"),
    **_each(HEAD_DIM, "attention_head_dim", "query_pre_attn_scalar"),
    **_each(8, "rotary_dim"),
    **_each(96, "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "dim_ff", "dff"),
    **_each(96, "decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "feed_forward_size"),
    **_each(96, "intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size"),
    # Experts: two of four.
    **_each(4, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    **_each(2, "num_experts_per_tok", "moe_topk", "moe_k"),
    **_each(1, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    **_each(1, "n_group", "topk_group"),
    **_each(1, "first_k_dense_replace", "num_dense_layers"),
    **_each(32, "moe_intermediate_size", "expert_ffn_hidden_size"),
    **_each(32, "shared_expert_intermediate_size", "shared_experts_intermediate_size"),
    **_each(32, "moe_shared_expert_intermediate_size"),
    # Latent attention: keys are wider than values.
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # Windows that a prompt of 60 tokens overruns several times.
    **_each(WINDOW, "sliding_window", "sliding_window_size", "attention_window_size"),
    **_each(WINDOW, "attention_chunk_size", "window_size", "local_attention"),
    # Sparse indexers: many heads, since scores of few heads tie at zero and ties pick other keys.
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 16,
    "index_block_size": 4,
    "index_topk_blocks": 4,
    # Recurrent states and short convolutions.
    **_each(16, "mamba_d_state", "state_size", "ssm_state_size"),
    **_each(8, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
    **_each(16, "mamba_d_head", "mamba_head_dim"),
    **_each(128, "mamba_d_ssm"),
    **_each(8, "mamba_dt_rank", "time_step_rank"),
    **_each(16, "mamba_chunk_size", "chunk_size"),
    **_each(2, "mamba_n_groups", "mamba_ngroups", "n_groups"),
    **_each(16, "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
    **_each(2, "linear_num_key_heads"),
    **_each(4, "linear_num_value_heads", "linear_num_heads"),
    # An encoder family decodes only when it is told to.
    "is_decoder": True,
    # With random weights, tied embeddings make each token predict itself.
    "tie_word_embeddings": False,
    # Multi-modal processors and other text-free parts.
    **_each(2, "num_mel_bins"),
}

# No dropout exists in eval mode, but training-mode tests want it off as well.
ZEROED_ENDINGS = ("dropout", "dropout_prob", "pdrop", "dropout_p", "layerdrop", "jitter_noise")

# Never end early: the recipes generate to the full length.
SPECIAL_TOKENS: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
}

TINY_VISION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
