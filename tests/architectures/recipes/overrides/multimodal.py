"""Overrides of multimodal models, whose text tower takes text-only prompts."""

from __future__ import annotations

from typing import Any

from transformers import PixtralVisionConfig

from tests.architectures.recipes.fields import HIDDEN, TINY_VISION, VOCAB

# Beyond the vocabulary: a random prompt holds no image.
_NO_IMAGE = {"image_token_index": VOCAB + 1}
_QWEN_VISION = {"depth": 1, "num_heads": 2, "embed_dim": HIDDEN, "out_hidden_size": HIDDEN}
# Three rotary sections (time, height, width) that fill half a head.
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_HALF_ROTARY = {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_QWEN_TEXT = {"rope_parameters": _SECTIONS}
_PATCHES = {"vision_config": TINY_VISION}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "aya_vision": _PATCHES,
    "glm4v": {
        "vision_config": {**TINY_VISION, **_QWEN_VISION},
        "text_config": {"rope_parameters": {**_SECTIONS, **_HALF_ROTARY}},
    },
    "idefics3": _PATCHES,
    "internvl": {"vision_config": {**TINY_VISION, "image_size": [28, 28], "patch_size": [14, 14]}},
    "llava": {"vision_config": PixtralVisionConfig(**TINY_VISION, head_dim=32), **_NO_IMAGE},
    "llava_next": {**_PATCHES, **_NO_IMAGE, "image_grid_pinpoints": [[28, 56]]},
    "mistral3": {"vision_config": {**TINY_VISION, "head_dim": 32}, **_NO_IMAGE},
    "paligemma": {"vision_config": {**TINY_VISION, "projection_dim": HIDDEN}, **_NO_IMAGE},
    "qwen2_5_vl": {
        "vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]},
        "text_config": _QWEN_TEXT,
    },
    "qwen2_vl": {"vision_config": _QWEN_VISION, "text_config": _QWEN_TEXT},
    "qwen3_vl": {
        "vision_config": {
            **_QWEN_VISION,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        "text_config": _QWEN_TEXT,
    },
    "smolvlm": _PATCHES,
}
