"""The map holds each cell's speed-up, and the gate's lines are its decisions."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.plots import (
    plot_gate_choices,
    plot_generate_bench,
    plot_speedup_map,
    save,
)

pytest.importorskip("matplotlib")


def record(batch, length, *, fixed, auto, decisions=((0, 0), (10, 4))):
    variants = [
        {"name": "plain", "k": None, "decode_speedup": 1.0},
        {"name": "k=8 s=0.05", "k": 8, "decode_speedup": fixed},
    ]
    if auto is not None:
        stats = {"decisions": [{"length": length + place, "k": k} for place, k in decisions]}
        variants.append({"name": "auto", "k": "auto", "decode_speedup": auto, "stats": stats})
    return {
        "batch": batch, "length": length, "variants": variants, "best_fixed": "k=8 s=0.05",
        "settings": {"new_tokens": 50},
    }  # fmt: skip


@pytest.fixture
def records():
    return [
        record(1, 1000, fixed=0.8, auto=1.0),
        record(8, 1000, fixed=1.2, auto=1.1),
        record(8, 4000, fixed=1.9, auto=1.8),
    ]


def test_the_map(records):
    axes = plot_speedup_map(records)
    (image,) = axes.images
    table = image.get_array()
    assert table[0, 0] == 1.0
    assert table[1].tolist() == [1.1, 1.8]
    assert [text.get_text() for text in axes.texts] == ["1.00x", "1.10x", "1.80x"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1,000", "4,000"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "8"]
    # Break-even is the middle of the colours.
    assert sum(image.get_clim()) == pytest.approx(2.0)
    best = plot_speedup_map(records, best_fixed=True)
    assert best.images[0].get_array()[1].tolist() == [1.2, 1.9]


def test_the_choices(records):
    axes = plot_gate_choices(records)
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["B=1, L=1,000", "B=8, L=1,000", "B=8, L=4,000"]
    bars = [(round(bar.get_y() + 0.35), bar.get_x(), bar.get_width()) for bar in axes.patches]
    # Plain for 10 tokens, then drafts of 4 up to the end of 50.
    assert bars == [(lane, x, w) for lane in range(3) for x, w in ((0, 10), (10, 40))]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[2] != colours[1] == colours[3]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["plain", "k = 4"]


def test_both_in_one_file(records, tmp_path):
    assert save(plot_generate_bench(records), tmp_path / "bench.svg").stat().st_size > 1000


def test_nothing_to_draw_is_said():
    plain = [record(1, 10, fixed=1.0, auto=None)]
    for draw in (plot_speedup_map, plot_gate_choices, plot_generate_bench):
        with pytest.raises(ValueError, match="no record holds a run of the gate; run it with"):
            draw(plain)
    with pytest.raises(ValueError, match="no record holds a fixed setting"):
        plot_speedup_map([{**plain[0], "best_fixed": None}], best_fixed=True)
