"""Figures of measurements. Each function draws on the `Axes` it is given, or on a new figure's."""

from pillarattn.evaluation.plots.acceptance import (
    plot_acceptance_by_length,
    plot_acceptance_by_position,
    plot_acceptance_vs_s,
)
from pillarattn.evaluation.plots.canvas import new_axes, new_stack, save
from pillarattn.evaluation.plots.cluster_day import plot_cluster_day
from pillarattn.evaluation.plots.engine_bench import plot_engine_bench
from pillarattn.evaluation.plots.forecast import (
    plot_head_budgets,
    plot_head_rounds,
    plot_learnt_weights,
    plot_weight_course,
)
from pillarattn.evaluation.plots.generate_bench import (
    plot_gate_choices,
    plot_generate_bench,
    plot_speedup_map,
)
from pillarattn.evaluation.plots.kept_keys import (
    kept_keys_html,
    plot_kept_by_layer,
    plot_kept_keys,
    plot_kept_text,
)
from pillarattn.evaluation.plots.ladder import plot_ladder, plot_layer_prices
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
    "plot_engine_bench",
    "plot_gate_choices",
    "plot_generate_bench",
    "plot_head_budgets",
    "plot_head_rounds",
    "plot_kept_by_layer",
    "plot_kept_keys",
    "plot_kept_text",
    "plot_ladder",
    "plot_layer_prices",
    "plot_learnt_weights",
    "plot_recall_by_head",
    "plot_recall_by_layer",
    "plot_speedup",
    "plot_speedup_map",
    "plot_weight_course",
    "save",
]
