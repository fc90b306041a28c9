"""Sparse self-speculation over any target that turns tokens into logits."""

from pillarattn.decoding.generator import SelfSpeculativeGenerator
from pillarattn.decoding.stats import GenerationStats

__all__ = ["GenerationStats", "SelfSpeculativeGenerator"]
