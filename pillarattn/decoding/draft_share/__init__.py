"""Draft shares: policies that say what share of the context a round's drafts read."""

from pillarattn.decoding.draft_share.acceptance import AcceptanceShare
from pillarattn.decoding.draft_share.base import DRAFT_SHARES, ConstantShare, DraftShare

__all__ = ["DRAFT_SHARES", "AcceptanceShare", "ConstantShare", "DraftShare"]
