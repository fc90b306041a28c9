"""Lossless sparse self-speculative decoding for Hugging Face causal language models."""

from pillarattn import theory
from pillarattn.config import PillarConfig
from pillarattn.decoding.drafters import AssistantDrafter, Drafter
from pillarattn.decoding.drafters.heads import (
    DraftHead,
    Eagle3Head,
    HeadDrafter,
    HeadShape,
    MtpHead,
)
from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.engine.config import EngineConfig
from pillarattn.engine.engine import Engine
from pillarattn.engine.request import RequestOutput, SamplingParams
from pillarattn.errors import UnsupportedModelError
from pillarattn.evaluation.lossless import LosslessReport, check_lossless
from pillarattn.evaluation.probe import acceptance_probe
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.strategies import Strategy, register_strategy
from pillarattn.patch.cache_adapter import PillarCache

# The function shares its name with its package; importing it last makes the function win.
from pillarattn.patch.patching import patch, unpatch

__version__ = "0.1.0"

__all__ = [
    "AssistantDrafter",
    "DraftHead",
    "Drafter",
    "Eagle3Head",
    "Engine",
    "EngineConfig",
    "HeadDrafter",
    "HeadShape",
    "LosslessReport",
    "MtpHead",
    "PillarAttention",
    "PillarCache",
    "PillarConfig",
    "RequestOutput",
    "SamplingParams",
    "SelfSpeculativeGenerator",
    "Strategy",
    "UnsupportedModelError",
    "acceptance_probe",
    "check_lossless",
    "patch",
    "register_strategy",
    "theory",
    "unpatch",
]
