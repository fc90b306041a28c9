"""Composable modules and their state; nothing here knows transformers."""

from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.cache import ContiguousCache, ContiguousLayer
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.selector import ForcedTokens, Selector
from pillarattn.modules.step import AttentionOptions, StepState
from pillarattn.modules.strategies import SelectionRequest, Strategy, register_strategy

__all__ = [
    "AttentionOptions",
    "ContiguousCache",
    "ContiguousLayer",
    "ForcedTokens",
    "PillarAttention",
    "ScoreBuffer",
    "SelectionRequest",
    "Selector",
    "StepState",
    "Strategy",
    "register_strategy",
]
