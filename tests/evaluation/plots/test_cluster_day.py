"""The figure of a simulated day says that it is one."""

from __future__ import annotations

import pytest

from pillarattn.evaluation.plots import plot_cluster_day, save


def record(mode="plain", replicas=2, ranks=1):
    hours = [
        {"hour": float(h), "asked_tokens_per_second": 5.0, "tokens_per_second": 4.0 + h,
         "requests_present": 2.0, "first_token_p90_seconds": None if h == 3 else 0.2}
        for h in range(24)
    ]  # fmt: skip
    return {"kind": "cluster_day_simulation", "mode": mode, "replicas": replicas, "ranks": ranks,
            "model": "Qwen3-8B", "hardware": "H200", "requests": 10, "day": {"seconds": 60.0},
            "hours": hours}  # fmt: skip


def test_three_panels(tmp_path):
    pytest.importorskip("matplotlib")
    panels = plot_cluster_day([record(), record("unified"), record("unified", 1, 2)])
    assert len(panels) == 3
    assert "Simulation, not a measurement" in panels[0].get_title()
    labels = panels[0].get_legend_handles_labels()[1]
    assert labels == ["plain, 2 x 1 GPU", "unified, 2 x 1 GPU", "unified, 1 x TP2",
                      "asked for by arrivals"]  # fmt: skip
    assert list(panels[0].lines[0].get_ydata()) == [4.0 + h for h in range(24)]
    # Colours tell modes, dashes tell layouts.
    assert panels[0].lines[1].get_color() == panels[0].lines[2].get_color()
    assert panels[0].lines[1].get_linestyle() != panels[0].lines[2].get_linestyle()
    assert save(panels[0], tmp_path / "day.png").stat().st_size > 0


def test_other_records_are_refused():
    for records in ([], [{"kind": "evaluation"}]):
        with pytest.raises(ValueError, match="needs records of simulate_day"):
            plot_cluster_day(records)
