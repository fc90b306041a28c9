"""Recall maps hold the recall of each head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pillarattn.evaluation.plots import plot_recall_by_head, plot_recall_by_layer
from pillarattn.evaluation.plots.recall import recall_floor
from pillarattn.evaluation.report_rows import measurements

pytest.importorskip("matplotlib")


@pytest.fixture
def row(make_record):
    return measurements([make_record()]).rows[0]


def test_a_map_has_layers_across_and_heads_upwards(row):
    axes = plot_recall_by_head(row)
    (image,) = axes.images
    assert image.get_array().tolist() == [[0.9, 1.0], [0.8, 0.9]]
    assert image.get_clim() == (0.5, 1.0)
    assert "mean 0.900" in axes.get_title()


def test_maps_can_share_a_scale(row):
    low = replace(row, recall_by_head=[[0.1, 0.9]])
    assert recall_floor([row]) == 0.5
    assert recall_floor([row, low]) == 0.0
    assert plot_recall_by_head(row, floor=0.0).images[0].get_clim() == (0.0, 1.0)


def test_lines_are_means_over_heads(row):
    (line,) = plot_recall_by_layer([row]).lines
    assert line.get_ydata().tolist() == pytest.approx([0.85, 0.95])


def test_the_title_says_on_what_and_bounds_are_last_in_the_legend(make_record):
    rows = measurements([make_record(n) for n in ("uniform", "oracle", "streaming")]).rows
    axes = plot_recall_by_layer(rows)
    assert axes.get_title().endswith(f"\nsmollm2, {rows[0].task}")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["streaming", "oracle (upper bound)", "uniform (lower bound)"]


def test_no_recall_is_said_so(row):
    with pytest.raises(ValueError, match="set recall_tokens above 0"):
        plot_recall_by_head(replace(row, recall_by_head=()))
