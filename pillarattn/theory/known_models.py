"""Configs of well-known models, so that planning needs neither a network nor a download."""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def _dense(base: dict[str, Any], layers: int, hidden: int, mlp: int, heads: int) -> dict[str, Any]:
    return {
        **base,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
    }


# The fields that the planner reads, from each model's published config.json.
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **_dense(_LLAMA, 30, 576, 1536, 9),
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": {**_dense(_QWEN3, 28, 2048, 6144, 16), "tie_word_embeddings": True},
    "Qwen3-8B": _dense(_QWEN3, 36, 4096, 12288, 32),
    "Qwen3-14B": _dense(_QWEN3, 40, 5120, 17408, 40),
    "Qwen3-32B": _dense(_QWEN3, 64, 5120, 25600, 64),
    "Qwen3-30B-A3B": {
        **_dense(_QWEN3, 48, 2048, 6144, 32),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "Llama-3.1-8B": _dense(_LLAMA, 32, 4096, 14336, 32),
    "Llama-3.1-70B": _dense(_LLAMA, 80, 8192, 28672, 64),
    "gpt-oss-20b": {
        **_dense(_LLAMA, 24, 2880, 2880, 64),
        "model_type": "gpt_oss",
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "DeepSeek-V3": {
        **_dense(_LLAMA, 61, 7168, 18432, 128),
        "model_type": "deepseek_v3",
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
}


_OWNERS = ("qwen", "huggingfacetb", "meta-llama", "openai", "deepseek-ai")


def known_model(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the proper name and config of a known model, or None; case does not matter.

    Its owner may stand in front ("Qwen/Qwen3-8B"), and "smollm2" is SmolLM2-135M.
    """
    owner, _, wanted = name.lower().rpartition("/")
    if owner and owner not in _OWNERS:
        return None
    wanted = {"smollm2": "smollm2-135m"}.get(wanted, wanted)
    for proper, config in KNOWN_MODELS.items():
        if wanted == proper.lower():
            return proper, dict(config)
    return None
