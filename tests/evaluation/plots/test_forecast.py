"""Pictures of the forecast hold the weights, keys and budgets of the trace."""

from __future__ import annotations

import pytest
import torch

from pillarattn.evaluation.forecast_trace import ForecastTrace, HeadRounds
from pillarattn.evaluation.plots import (
    plot_head_budgets,
    plot_head_rounds,
    plot_learnt_weights,
    plot_weight_course,
    save,
)
from pillarattn.evaluation.plots.forecast import MISSED, READ, _picture, _rgb

pytest.importorskip("matplotlib")


@pytest.fixture
def trace():
    weights = torch.arange(3 * 2 * 2 * 2).view(3, 2, 2, 2) / 10 - 1
    counts = torch.tensor([[[1, 3], [5, 7]]] * 3)
    kept = torch.zeros(3, 8, dtype=torch.bool)
    kept[:, 0] = True
    mass = torch.zeros(3, 8, dtype=torch.half)
    mass[:, 0], mass[:, 2] = 0.75, 0.25
    rounds = HeadRounds(mass, mass, kept, [4, 6, 8])
    return ForecastTrace(("now", "match"), [0, 3], [4, 6, 8], weights, counts, {(3, 1): rounds}, {})


def test_the_weight_map_has_a_row_a_feature_and_a_column_a_head(trace, tmp_path):
    axes = plot_learnt_weights(trace, choice=1)
    shown = torch.tensor(axes.images[0].get_array().tolist())
    torch.testing.assert_close(shown, trace.weights[1].flatten(0, 1).T)
    low, high = axes.images[0].get_clim()
    assert low == -high
    assert [t.get_text() for t in axes.get_yticklabels()] == ["now", "match"]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0", "3"]
    assert "after 6 tokens" in axes.get_title()
    assert save(axes, tmp_path / "a.png").stat().st_size > 0


def test_a_course_has_a_line_a_feature(trace):
    axes = plot_weight_course(trace, 3, 0)
    assert [line.get_label() for line in axes.lines] == ["now", "match"]
    assert axes.lines[1].get_xdata().tolist() == [4, 6, 8]
    assert axes.lines[1].get_ydata().tolist() == pytest.approx(trace.weights[:, 1, 0, 1].tolist())
    with pytest.raises(ValueError, match=r"layer must be one of \[0, 3\], got 1"):
        plot_weight_course(trace, 1, 0)


def test_a_head_shows_what_was_read_and_what_was_missed(trace):
    axes = plot_head_rounds(trace, 3, 1)
    assert "75%" in axes.get_title()
    picture = torch.tensor(axes.images[0].get_array().tolist())
    assert picture.shape == (2, 8, 3)
    torch.testing.assert_close(picture[0, 0], _rgb(READ), atol=1e-6, rtol=0)
    torch.testing.assert_close(picture[0, 2], _rgb(MISSED), atol=1e-6, rtol=0)
    assert picture[0, 1].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="layer 0, KV head 1 was not traced"):
        plot_head_rounds(trace, 0, 1)


def test_long_texts_show_the_most_attended_key_of_a_column():
    mass, read = torch.zeros(1, 1000), torch.zeros(1, 1000, dtype=torch.bool)
    mass[0, 500], mass[0, 501] = 0.3, 0.4
    read[0, 501] = True
    picture = _picture(mass, read, [1000])
    assert picture.shape == (1, 334, 3)
    assert torch.equal(picture[0, 167], _rgb(READ)) and torch.equal(picture[0, 166], _rgb(MISSED))


def test_budgets_are_means_with_heads_upwards(trace):
    axes = plot_head_budgets(trace)
    assert axes.images[0].get_array().tolist() == [[1, 5], [3, 7]]
    assert "4 a head in the mean, 1 to 7" in axes.get_title()
