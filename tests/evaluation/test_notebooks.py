"""Notebooks are committed clean, and their cells run on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def code_cells(path):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_no_outputs_are_committed(path):
    cells = code_cells(path)
    assert cells
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_runs(path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    matplotlib.use("Agg")
    from pillarattn.evaluation import demo_model, notebook_model

    monkeypatch.setattr(notebook_model, "has_demo_model", lambda: False)
    assert demo_model.has_demo_model is not notebook_model.has_demo_model
    names: dict[str, object] = {}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
