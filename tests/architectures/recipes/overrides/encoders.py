"""Overrides of encoder families used as decoders, and of decoders taken from a larger model."""

from __future__ import annotations

from typing import Any

ENCODERS: dict[str, dict[str, Any]] = {
    # Block-sparse attention needs whole blocks of the prompt; causal use falls back to full.
    "big_bird": {"attention_type": "original_full"},
    "blt": {
        # Its cache asks for a field that the class lacks.
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 101,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "phi4_multimodal": {
        "vision_config": {"image_size": 28, "patch_size": 14, "crop_size": 28},
        "audio_config": {
            "ext_pw_out_channel": 64,
            "depthwise_separable_out_channel": 64,
            "nemo_conv_channels": 64,
        },
    },
    "reformer": {
        "hash_seed": 0,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 101,
        "pronunciation_embed_dim": 16,
        "shape_vocab_size": 101,
        "shape_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
}
