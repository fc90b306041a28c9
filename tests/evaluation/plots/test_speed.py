"""The speed plot shows what was measured beside what theory allows."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.plots import plot_speedup
from pillarattn.evaluation.report_rows import measurements

pytest.importorskip("matplotlib")


def test_measured_bounds_and_roofline(make_record):
    known = make_record("quest")
    known["metrics"]["predicted_speedup"] = {"hardware": "H200", "speedup": 2.5, "length": 9}
    unknown = make_record("vegas")
    unknown["metrics"]["decode_speedup"] = None
    axes = plot_speedup(measurements([make_record(), known, unknown]).rows)
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "pillar, k=8, s=0.05, batch 1",
        "quest, k=8, s=0.05, batch 1",
    ]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == [
        "theory: weights only\nto cache only",
        "measured",
        "roofline of H200",
    ]
    points = [tuple(line.get_xydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert points == [(1.5, 0.0), (2.5, 1.0), (1.5, 1.0)]


def test_nothing_measured_is_an_empty_figure():
    axes = plot_speedup([])
    assert axes.get_legend() is None
