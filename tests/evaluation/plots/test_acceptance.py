"""The lines of acceptance plots are the numbers of the rows."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.plots import (
    new_axes,
    plot_acceptance_by_length,
    plot_acceptance_by_position,
    plot_acceptance_vs_s,
)
from pillarattn.evaluation.report_rows import measurements

pytest.importorskip("matplotlib")


@pytest.fixture
def rows(make_record):
    table = {"pillar": (3, 4), "oracle": (5, 6), "uniform": (1, 1.5)}
    return measurements(
        make_record(name, value, s=s)
        for name, values in table.items()
        for s, value in zip((0.02, 0.05), values, strict=True)
    ).rows


def lines(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_against_s(rows):
    axes = plot_acceptance_vs_s(rows)
    assert lines(axes) == {
        "pillar": [[0.02, 3.0], [0.05, 4.0]],
        "oracle (upper bound)": [[0.02, 5.0], [0.05, 6.0]],
        "uniform (lower bound)": [[0.02, 1.0], [0.05, 1.5]],
    }
    assert len(axes.collections) == 1  # the ground between the bounds
    assert axes.get_ylim()[1] >= 8
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.02", "0.05"]
    assert "k = 8" in axes.get_ylabel()


def test_repeated_cells_are_averaged(make_record):
    rows = measurements([make_record("pillar", 2.0), make_record("pillar", 4.0, seed=1)]).rows
    assert lines(plot_acceptance_vs_s(rows)) == {"pillar": [[0.05, 3.0]]}


def test_one_figure_shows_one_k(make_record):
    rows = measurements([make_record(k=4), make_record(k=8)]).rows
    with pytest.raises(ValueError, match="one figure shows one k, got 4, 8"):
        plot_acceptance_vs_s(rows)


def test_by_position(rows):
    share = [row for row in rows if row.s == 0.05]
    found = lines(plot_acceptance_by_position(share))
    assert found["pillar"][0] == [1.0, 0.5]
    assert len(found["pillar"]) == 8


def test_by_length(rows):
    share = [row for row in rows if row.s == 0.05]
    axes = plot_acceptance_by_length(share)
    points = lines(axes)["pillar"]
    assert [y for _, y in points] == [4.5, 3.5]
    assert [512 < x < 1024 for x, _ in points] == [True, False]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["512", "1,024", "2,048"]


@pytest.mark.parametrize(
    "plot", [plot_acceptance_vs_s, plot_acceptance_by_position, plot_acceptance_by_length]
)
def test_it_draws_where_it_is_told_to_and_bears_nothing(rows, plot):
    axes = new_axes()
    assert plot([row for row in rows if row.s == 0.05], axes=axes) is axes
    assert "nothing measured" in plot([]).get_title()
