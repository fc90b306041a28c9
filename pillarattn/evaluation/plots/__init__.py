"""Figures of measurements. Each function draws on the `Axes` it is given, or on a new figure's."""

from pillarattn.evaluation.plots.acceptance import (
    plot_acceptance_by_length,
    plot_acceptance_by_position,
    plot_acceptance_vs_s,
)
from pillarattn.evaluation.plots.canvas import new_axes, new_stack, save
from pillarattn.evaluation.plots.cluster_day import plot_cluster_day
from pillarattn.evaluation.plots.kept_keys import (
    kept_keys_html,
    plot_kept_by_layer,
    plot_kept_keys,
    plot_kept_text,
)
from pillarattn.evaluation.plots.recall import plot_recall_by_head, plot_recall_by_layer
from pillarattn.evaluation.plots.speed import plot_speedup

__all__ = [
    "kept_keys_html",
    "new_axes",
    "new_stack",
    "plot_acceptance_by_length",
    "plot_acceptance_by_position",
    "plot_acceptance_vs_s",
    "plot_cluster_day",
    "plot_kept_by_layer",
    "plot_kept_keys",
    "plot_kept_text",
    "plot_recall_by_head",
    "plot_recall_by_layer",
    "plot_speedup",
    "save",
]
