"""The presets in `reproduce/` expand, and everything that they name exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from pillarattn.cli.option_values import check_names
from pillarattn.evaluation.sweep_grid import SUFFIXES, expand, read_sweep

FOLDER = Path(__file__).resolve().parents[2] / "reproduce"
PRESETS = sorted(path for path in FOLDER.iterdir() if path.suffix in SUFFIXES)


def test_there_are_presets_and_the_readme_names_each():
    readme = (FOLDER / "README.md").read_text()
    assert len(PRESETS) >= 5
    assert [path.name for path in PRESETS if path.name not in readme] == []


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_a_preset_expands_to_cells_that_can_run(path):
    pytest.importorskip("yaml")
    sweep = read_sweep(path)
    assert sweep["name"] == path.stem.replace("_", "-")
    assert len(sweep["about"]) > 40
    cells = expand(sweep, overrides={"device": "cpu"})
    assert len(cells) > 1
    for cell in cells:
        check_names(cell)
        assert not cell.run_code
    # A list of cells tells them apart.
    assert len({cell.label for cell in cells}) == len(cells)


def test_a_path_of_data_can_be_given_to_all():
    pytest.importorskip("yaml")
    for path in PRESETS:
        assert {c.data for c in expand(read_sweep(path), overrides={"data": "d"})} == {"d"}
