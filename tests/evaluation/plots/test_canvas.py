"""Figures stand alone, and a strategy looks the same in each of them."""

from __future__ import annotations

import sys

import pytest

from pillarattn.evaluation.plots.canvas import line_style, new_axes, new_stack, place_of, save

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_figure_is_saved_as_its_suffix_says(tmp_path, suffix, magic):
    path = save(new_axes(), tmp_path / "deep" / f"a.{suffix}")
    assert path.read_bytes().startswith(magic)


def test_a_stack_is_one_figure():
    axes = new_stack(3, 6, 2)
    assert len({id(one.figure) for one in axes}) == 1
    assert list(axes[0].figure.get_size_inches()) == [6, 6]
    assert len(axes[0].figure.axes) == 3


def test_strategies_differ_and_keep_their_looks():
    names = ["pillar", "streaming", "quest", "mine", "yours", "oracle", "uniform"]
    styles = {name: line_style(name, names) for name in names}
    looks = {(s["color"], s["marker"]) for n, s in styles.items() if n not in ("oracle", "uniform")}
    assert len(looks) == 5
    assert line_style("pillar", ["pillar"]) == styles["pillar"]
    assert styles["oracle"]["label"] == "oracle (upper bound)"
    many = [f"s{i}" for i in range(30)]
    assert all(line_style(name, many) for name in many)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pillarattn\[eval\]'"):
        new_axes()


def test_bounds_come_last():
    names = ["uniform, seed=1", "streaming", "oracle", "pillar"]
    assert sorted(names, key=place_of) == ["pillar", "streaming", "oracle", "uniform, seed=1"]
