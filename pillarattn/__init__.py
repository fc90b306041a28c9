"""Lossless sparse self-speculative decoding for Hugging Face causal language models."""

from pillarattn.config import PillarConfig
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.errors import UnsupportedModelError
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.strategies import Strategy, register_strategy
from pillarattn.patch.cache_adapter import PillarCache

# The function shares its name with its package; importing it last makes the function win.
from pillarattn.patch.patching import patch, unpatch

__version__ = "0.1.0"

__all__ = [
    "PillarAttention",
    "PillarCache",
    "PillarConfig",
    "SelfSpeculativeGenerator",
    "Strategy",
    "UnsupportedModelError",
    "patch",
    "register_strategy",
    "unpatch",
]
