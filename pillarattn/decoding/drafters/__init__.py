"""Drafters: who proposes the tokens of a round."""

from pillarattn.decoding.drafters.base import DRAFTERS, Drafter, DraftRequest
from pillarattn.decoding.drafters.sparse import SparseDrafter

__all__ = ["DRAFTERS", "DraftRequest", "Drafter", "SparseDrafter"]
