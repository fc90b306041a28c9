"""docs/forecast.md names the features, constants and files that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pillarattn.kernels.key_forecast import FEATURES, features
from pillarattn.modules.strategies import ForecastStrategy
from pillarattn.modules.strategies.forecast.strategy import DEFAULT_FEATURES, REMEMBERED

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")


def first_cells(heading):
    """Return the names in the first column of the table under a heading cell."""
    table = TEXT.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]


def test_every_feature_has_a_line():
    listed = [name for names in first_cells("feature") for name in names]
    assert sorted(listed) == sorted(FEATURES)
    assert [name for (name,) in first_cells("remembered")] == list(REMEMBERED)
    left_out = re.search(r"takes all but (.*?)\. ", TEXT).group(1)
    assert set(re.findall(r"`(\w+)`", left_out)) == set(FEATURES) - set(DEFAULT_FEATURES)


def test_constants_are_those_of_the_code():
    keep = features.AVERAGE_DECAY
    assert f"`{keep:g} average + {1 - keep:g} now`" in TEXT
    assert f"`max(now, {features.PEAK_DECAY:g} peak)`" in TEXT
    assert f"{features.SPREAD_DECAY:g}**j" in TEXT
    assert f"| `match` | {features.MATCH_MASS:g} where" in TEXT
    assert f"| `constant` | {features.CONSTANT_MASS:g} |" in TEXT
    default = ForecastStrategy()
    assert f"`g = {default.forget:g}` (`forget`)" in TEXT
    assert f"`p = {default.ridge:g}` (`ridge`)" in TEXT
    count = len(default.features)
    assert f"F = {count} features cost {count * count + count} numbers" in TEXT


@pytest.mark.parametrize(
    ("dim", "share", "fair"), [(64, "4.4 %", "0.0478"), (128, "2.2 %", "0.0489")]
)
def test_extra_reads_are_what_the_page_says(dim, share, fair):
    # `extra_reads` counts keys with values of 64 numbers each.
    reads = ForecastStrategy().extra_reads(1000, 8) * 64 / dim / 1000
    assert f"{reads / 0.05:.1%}".replace("%", " %") == share and share in TEXT
    assert 0.05 - reads == pytest.approx(float(fair), abs=1e-4) and fair in TEXT
    assert f"{ForecastStrategy().selection_bytes:g} bytes" in TEXT


def test_code_runs_and_paths_exist():
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "forecast.md", "exec", dont_inherit=True), {"__name__": "page"})
    paths = re.findall(r"\]\(((?:\.\./)?[\w/.]+)\)", TEXT) + re.findall(
        r"`(pillarattn/\S+\.py)`", TEXT
    )
    assert len(paths) >= 4
    for path in paths:
        base = ROOT if path.startswith("pillarattn/") else ROOT / "docs"
        assert (base / path).exists(), path


def test_the_tables_are_the_records():
    folder = ROOT / "benchmarks" / "results"
    lines = (folder / "forecast_ladder_cpu.jsonl").read_text().splitlines()[1:]
    found = {(r["label"], r["k"], r["s"], r["text"]): r for r in map(json.loads, lines)}
    section = TEXT[TEXT.index("## Measured") : TEXT.index("## Limits")]
    texts = re.search(r"^\| k = 8, s = 0.05 \| (.*) \| mean \|$", section, re.MULTILINE)[1]
    texts = texts.split(" | ")
    weighted = "forecast, layer weights"
    first = [("pillar", 0.05), ("forecast", 0.05), (weighted, 0.05),
             (f"{weighted}, equal bytes at D=64", 0.045)]  # fmt: skip
    rows = re.findall(r"^\| [^|]* \| (\d\.\d\d ± .*) \| (\d\.\d\d)", section, re.MULTILINE)
    assert len(rows) == len(first) and len(texts) == 3
    for (cells, mean), (label, s) in zip(rows, first, strict=True):
        exact = [found[label, 8, s, text] for text in texts]
        for cell, record in zip(cells.split(" | "), exact, strict=True):
            shown = f"{record['mean_accepted']:.2f} ± {record['standard_error']:.2f}"
            assert cell == shown
        assert float(mean) == pytest.approx(sum(r["mean_accepted"] for r in exact) / 3, abs=0.006)
    others = re.findall(r"^\| k = (\d+), s = ([\d.]+) \| (.*) \| [^|]* \|$", section, re.MULTILINE)
    others = [(k, s, cells.split(" | ")) for k, s, cells in others if "/" in cells]
    assert len(others) == 4
    for k, s, cells in others:
        for cell, text in zip(cells, texts, strict=True):
            for number, label in zip(cell.split(" / "), ("pillar", weighted), strict=True):
                record = found[label, int(k), float(s), text]
                assert number == f"{record['mean_accepted']:.2f}"
    lines = (folder / "forecast_generation_cpu.jsonl").read_text().splitlines()
    runs = {
        (r["config"]["strategy"], r["config"]["temperature"]): r for r in map(json.loads, lines)
    }
    assert all(run["lossless"]["lossless"] for run in runs.values())
    for name in ("pillar", "forecast"):
        assert f"{runs[name, 0.0]['metrics']['mean_accepted']:.2f}" in section
