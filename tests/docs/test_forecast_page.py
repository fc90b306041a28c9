"""docs/forecast.md names the features, constants and files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pillarattn.modules.strategies import ForecastStrategy
from pillarattn.modules.strategies.forecast import FEATURES, features
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
    ("dim", "share", "fair"), [(64, "9.8 %", "0.0451"), (128, "4.9 %", "0.0476")]
)
def test_extra_reads_are_what_the_page_says(dim, share, fair):
    # `extra_reads` counts keys with values of 64 numbers each.
    reads = ForecastStrategy().extra_reads(1000, 8) * 64 / dim / 1000
    assert f"{reads / 0.05:.1%}".replace("%", " %") == share and share in TEXT
    assert 0.05 - reads == pytest.approx(float(fair), abs=2e-4) and fair in TEXT


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
