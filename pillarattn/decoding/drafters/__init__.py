"""Drafters: who proposes the tokens of a round."""

from pillarattn.decoding.drafters.assistant import AssistantDrafter
from pillarattn.decoding.drafters.base import DRAFTERS, Drafter, DraftRequest, TargetBuilder
from pillarattn.decoding.drafters.chain import ChainDrafter
from pillarattn.decoding.drafters.heads import (
    DraftHead,
    Eagle3Head,
    HeadDrafter,
    HeadShape,
    MtpHead,
)
from pillarattn.decoding.drafters.ngram import NgramDrafter
from pillarattn.decoding.drafters.sparse import SparseDrafter

__all__ = [
    "DRAFTERS",
    "AssistantDrafter",
    "ChainDrafter",
    "DraftHead",
    "DraftRequest",
    "Drafter",
    "Eagle3Head",
    "HeadDrafter",
    "HeadShape",
    "MtpHead",
    "NgramDrafter",
    "SparseDrafter",
    "TargetBuilder",
]
