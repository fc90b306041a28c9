"""Acceptance rules: each draws tokens and judges drafts so that the output is the target's own."""

from pillarattn.decoding.acceptance.base import ACCEPTANCE, AcceptanceRule
from pillarattn.decoding.acceptance.block import BlockRule
from pillarattn.decoding.acceptance.greedy import GreedyRule
from pillarattn.decoding.acceptance.gumbel import GumbelRule
from pillarattn.decoding.acceptance.rejection import RejectionRule

__all__ = ["ACCEPTANCE", "AcceptanceRule", "BlockRule", "GreedyRule", "GumbelRule", "RejectionRule"]
