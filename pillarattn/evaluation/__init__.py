"""Measure and report: losslessness, comparisons with plain decoding, tasks, sweeps and reports."""

from pillarattn.evaluation.comparison import Comparison, compare
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.lossless import FirstDifference, LosslessReport, check_lossless
from pillarattn.evaluation.report import make_report
from pillarattn.evaluation.report_rows import load_measurements, measurements
from pillarattn.evaluation.runner import Runner
from pillarattn.evaluation.sampling_law import exact_law, law_z_score
from pillarattn.evaluation.selection_trace import SelectionTrace, trace_selection
from pillarattn.evaluation.sweep import run_sweep
from pillarattn.evaluation.sweep_grid import expand, read_sweep
from pillarattn.evaluation.tasks import register_task
from pillarattn.evaluation.tasks.worked_maths import worked_maths

__all__ = [
    "Comparison",
    "EvalConfig",
    "FirstDifference",
    "LosslessReport",
    "Runner",
    "SelectionTrace",
    "check_lossless",
    "compare",
    "exact_law",
    "expand",
    "law_z_score",
    "load_measurements",
    "load_model",
    "make_report",
    "measurements",
    "read_sweep",
    "register_task",
    "run_sweep",
    "trace_selection",
    "worked_maths",
]
