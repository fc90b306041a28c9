"""Draft lengths: policies that say how many tokens a round drafts."""

from pillarattn.decoding.draft_length.acceptance import AcceptanceLength
from pillarattn.decoding.draft_length.base import DRAFT_LENGTHS, DraftLength
from pillarattn.decoding.draft_length.confidence import ConfidenceLength
from pillarattn.decoding.draft_length.constant import ConstantLength

__all__ = [
    "DRAFT_LENGTHS",
    "AcceptanceLength",
    "ConfidenceLength",
    "ConstantLength",
    "DraftLength",
]
