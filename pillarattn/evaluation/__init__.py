"""Measure and report: losslessness, comparisons with plain decoding, and texts to run them on."""

from pillarattn.evaluation.comparison import Comparison, compare
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.lossless import FirstDifference, LosslessReport, check_lossless
from pillarattn.evaluation.sampling_law import exact_law, law_z_score
from pillarattn.evaluation.tasks.worked_maths import worked_maths

__all__ = [
    "Comparison",
    "FirstDifference",
    "LosslessReport",
    "check_lossless",
    "compare",
    "exact_law",
    "law_z_score",
    "load_model",
    "worked_maths",
]
