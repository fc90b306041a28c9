"""Draft heads: small networks on the target's hidden states."""

from pillarattn.decoding.drafters.heads.base import DraftHead, HeadStep
from pillarattn.decoding.drafters.heads.block import HeadShape
from pillarattn.decoding.drafters.heads.drafter import HeadDrafter
from pillarattn.decoding.drafters.heads.eagle3 import Eagle3Head
from pillarattn.decoding.drafters.heads.mtp import MtpHead

__all__ = ["DraftHead", "Eagle3Head", "HeadDrafter", "HeadShape", "HeadStep", "MtpHead"]
