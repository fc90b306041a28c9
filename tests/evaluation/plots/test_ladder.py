"""Ladders have a bar for each record, prices one for each layer."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.calibration import Calibration
from pillarattn.evaluation.plots import new_stack, plot_ladder, plot_layer_prices, save

pytest.importorskip("matplotlib")


def record(label, accepted, **more):
    return {"label": label, "mean_accepted": accepted, "standard_error": 0.1, "k": 8, "s": 0.05,
            **more}  # fmt: skip


def test_bars_come_in_their_order(tmp_path):
    axes = plot_ladder([record("pillar", 4.0), record("more", 5.0), record("oracle", 6.5)])
    assert [bar.get_width() for bar in axes.patches] == [4.0, 5.0, 6.5]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["pillar", "more", "oracle"]
    low, high = axes.get_ylim()
    assert low > high, "the first is on top"
    assert "k = 8, s = 0.05" in axes.get_title()
    assert axes.patches[2].get_alpha() < axes.patches[0].get_alpha(), "bounds are pale"
    assert axes.get_legend() is None
    assert [t.get_text() for t in axes.texts] == ["4.00", "5.00", "6.50"]
    assert axes.texts[2].xy[0] < axes.get_xlim()[1]
    assert save(axes, tmp_path / "a.png").stat().st_size > 0


def test_texts_have_colours_and_may_lack_a_setting():
    rows = [record("a", 1.0, text="code"), record("a", 2.0, text="prose"),
            record("b", 3.0, text="prose", s=0.1)]  # fmt: skip
    axes = plot_ladder(rows)
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["code", "prose"]
    first, second, third = axes.patches
    assert first.get_facecolor() != second.get_facecolor() == third.get_facecolor()
    assert second.get_y() > first.get_y() and round(third.get_y() - second.get_y(), 6) == 1
    assert "s =" not in axes.get_title()


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(ValueError, match="at least one record, and a label in each"):
        plot_ladder([])
    with pytest.raises(ValueError, match="a label in each"):
        plot_ladder([{"mean_accepted": 1.0}])
    with pytest.raises(ValueError, match="2 records have 1 different labels"):
        plot_ladder([record("a", 1.0), record("a", 2.0)])


def test_prices_are_those_of_the_measured_layers():
    found = Calibration("folder/a-model", 1500, 8, 0.05, 0.6, [0, 2], [0.01, 0.04], [0.5, 0.2],
                        [0.5, 1.0, 2.0])  # fmt: skip
    panels = plot_layer_prices(found)
    heights = [[bar.get_height() for bar in axes.patches] for axes in panels]
    assert heights == [[0.5, 0.2], [0.01, 0.04], [0.5, 2.0]]
    assert [t.get_text() for t in panels[2].get_xticklabels()] == ["0", "2"]
    assert "costs: a-model, 1,500 tokens, k = 8" in panels[0].get_title()
    again = plot_layer_prices(found, axes=new_stack(3, 4.0, 1.0))
    assert [len(axes.patches) for axes in again] == [2, 2, 2]
    with pytest.raises(ValueError, match="draws on 3 axes, got 1"):
        plot_layer_prices(found, axes=panels[:1])
