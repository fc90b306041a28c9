"""Lossless sparse self-speculative decoding for Hugging Face causal language models."""

from pillarattn import theory
from pillarattn.config import PillarConfig
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.errors import UnsupportedModelError
from pillarattn.evaluation.lossless import LosslessReport, check_lossless
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.strategies import Strategy, register_strategy
from pillarattn.patch.cache_adapter import PillarCache

# The function shares its name with its package; importing it last makes the function win.
from pillarattn.patch.patching import patch, unpatch

__version__ = "0.1.0"

__all__ = [
    "LosslessReport",
    "PillarAttention",
    "PillarCache",
    "PillarConfig",
    "SelfSpeculativeGenerator",
    "Strategy",
    "UnsupportedModelError",
    "check_lossless",
    "patch",
    "register_strategy",
    "theory",
    "unpatch",
]
