"""What single model types need beyond the table of field names."""

from __future__ import annotations

from typing import Any

from transformers import SiglipVisionConfig

from tests.architectures.recipes.fields import TINY_VISION
from tests.architectures.recipes.overrides.attention import ATTENTION
from tests.architectures.recipes.overrides.encoders import ENCODERS
from tests.architectures.recipes.overrides.multimodal import MULTIMODAL
from tests.architectures.recipes.overrides.recurrent import RECURRENT

__all__ = ["ASSIGNED", "MULTIMODAL", "OVERRIDES"]

OVERRIDES: dict[str, dict[str, Any]] = {
    **ATTENTION,
    **ENCODERS,
    **MULTIMODAL,
    **RECURRENT,
}
# What the text side of Gemma 3n reads of its vision configuration.
_GEMMA3N_VISION = {"rms_norm_eps": 1e-6, "vocab_offset": 97, "vocab_size": 4}
# Set after construction, because the class would refuse them.
ASSIGNED: dict[str, dict[str, Any]] = {
    # The vision tower of Gemma 3n needs the package timm. Text never reaches the tower.
    "gemma3n": {"vision_config": SiglipVisionConfig(**TINY_VISION, **_GEMMA3N_VISION)},
}
