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
    section = TEXT[TEXT.index("## Measured") : TEXT.index("### Unseen texts")]
    texts = re.search(r"^\| k = 8, s = 0.05 \| (.*) \| mean \|$", section, re.MULTILINE)[1]
    texts = texts.split(" | ")
    weighted = "forecast, layer weights"
    first = [("pillar", 0.05), ("forecast", 0.05), (weighted, 0.05),
             (f"{weighted}, equal bytes at D=64", 0.0478)]  # fmt: skip
    rows = re.findall(r"^\| [^|]* \| (\d\.\d\d ± .*) \| (\d\.\d\d)", section, re.MULTILINE)
    assert len(rows) == len(first) and len(texts) == 4
    for (cells, mean), (label, s) in zip(rows, first, strict=True):
        exact = [found[label, 8, s, text] for text in texts]
        for cell, record in zip(cells.split(" | "), exact, strict=True):
            shown = f"{record['mean_accepted']:.2f} ± {record['standard_error']:.2f}"
            assert cell == shown
        assert float(mean) == pytest.approx(sum(r["mean_accepted"] for r in exact) / 4, abs=0.006)
    others = re.findall(r"^\| k = (\d+), s = ([\d.]+) \| (.*) \| [^|]* \|$", section, re.MULTILINE)
    others = [(k, s, cells.split(" | ")) for k, s, cells in others if "/" in cells]
    assert len(others) == 4
    for k, s, cells in others:
        for cell, text in zip(cells, texts, strict=True):
            for number, label in zip(cell.split(" / "), ("pillar", weighted), strict=True):
                record = found[label, int(k), float(s), text]
                assert number == f"{record['mean_accepted']:.2f}"
    ranges = re.findall(r"^\| (\d),(\d+) to \d,\d+ \| (.*) \|$", section, re.MULTILINE)
    assert len(ranges) == 3
    for thousands, rest, cells in ranges:
        for cell, text in zip(cells.split(" | "), texts, strict=True):
            for number, label in zip(
                cell.split(" / "), ("pillar", "forecast", weighted), strict=True
            ):
                by_length = found[label, 8, 0.05, text]["by_length"]
                (part,) = [b for b in by_length if b["from"] == int(thousands + rest)]
                assert number == f"{part['mean_accepted']:.2f}"


def test_the_line_of_short_contexts_is_its_record():
    path = ROOT / "benchmarks" / "results" / "forecast_short_cpu.jsonl"
    records = map(json.loads, path.read_text().splitlines()[1:])
    found = {(r["label"], r["text"]): r["mean_accepted"] for r in records}
    (cells,) = re.findall(r"^\| 512 to 1,024 \| (.*) \|$", TEXT, re.MULTILINE)
    labels = ("pillar", "forecast", "forecast, layer weights")
    for cell, text in zip(
        cells.split(" | "), ("olympiadbench", "aime", "code", "prose"), strict=True
    ):
        assert cell == " / ".join(f"{found[label, text]:.2f}" for label in labels)


def test_the_unseen_texts_are_their_record():
    path = ROOT / "benchmarks" / "results" / "forecast_unseen_cpu.jsonl"
    section = TEXT[TEXT.index("### Unseen texts") : TEXT.index("### In generation")]
    rows = re.findall(r"^\| (.*) \| (\d.*) \| (\d.*) \| (\+\d+%) \|$", section, re.MULTILINE)
    records = list(map(json.loads, path.read_text().splitlines()))
    assert [row[0] for row in rows] == [record["about"]["text"] for record in records]
    for (_, *cells, gain), record in zip(rows, records, strict=True):
        means = [r["mean_accepted"] for r in record["records"]]
        assert [r["strategy"] for r in record["records"]] == ["pillar", "forecast"]
        for cell, r in zip(cells, record["records"], strict=True):
            assert cell == f"{r['mean_accepted']:.2f} ± {r['standard_error']:.2f}"
        assert gain == f"+{means[1] / means[0] - 1:.0%}"


def test_the_generation_table_is_the_record():
    path = ROOT / "benchmarks" / "results" / "forecast_generation_cpu.jsonl"
    runs = {}
    for run in map(json.loads, path.read_text().splitlines()):
        config = run["config"]
        name = config["strategy"]
        if isinstance(name, dict):
            name = "with layer weights"
        assert run["lossless"]["lossless"]
        runs[config["k"], config["temperature"], name] = run["metrics"]
    section = TEXT[TEXT.index("### In generation") : TEXT.index("### Ingredient")]
    rows = re.findall(r"^\| k = (\d+), (greedy|T = 0.6) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 4
    for k, law, cells in rows:
        key = (int(k), 0.0 if law == "greedy" else 0.6)
        pillar = runs[(*key, "pillar")]["acceptance_length"]
        cells = cells.split(" | ")
        assert cells[0] == f"{runs[(*key, 'pillar')]['mean_accepted']:.2f}"
        for cell, name in zip(cells[1:], ("forecast", "with layer weights"), strict=True):
            if (*key, name) not in runs:
                assert cell == ""
                continue
            metrics = runs[(*key, name)]
            gain = metrics["acceptance_length"] / pillar - 1
            assert cell == f"{metrics['mean_accepted']:.2f} (+{gain:.0%})"


def test_the_ladder_is_the_record():
    path = ROOT / "benchmarks" / "results" / "forecast_ingredients_cpu.jsonl"
    lines = path.read_text().splitlines()[1:]
    found = {(r["label"], r["text"]): r["mean_accepted"] for r in map(json.loads, lines)}
    section = TEXT[TEXT.index("### Ingredient") : TEXT.index("### What it is worth")]
    rows = re.findall(r"^\| ([^|]+) \| (\d\.\d\d) \| (\d\.\d\d) \|$", section, re.MULTILINE)
    assert {label for label, *_ in rows} == {label for label, _ in found}
    for label, *cells in rows:
        for cell, text in zip(cells, ("olympiadbench", "code"), strict=True):
            assert cell == f"{found[label, text]:.2f}"


def test_the_outlook_is_what_theory_says():
    from pillarattn.theory.hardware import HARDWARE
    from pillarattn.theory.known_models import KNOWN_MODELS
    from pillarattn.theory.planner import Workload, expect
    from pillarattn.theory.roofline import KERNELS
    from pillarattn.theory.shape_reading import shape_from_config

    shape = shape_from_config(KNOWN_MODELS["Qwen3-8B"])
    section = TEXT[TEXT.index("### What it is worth") :]
    accepted = [float(n) for n in re.search(r"above\*\*, ([\d.]+) and ([\d.]+),", section).groups()]
    rows = re.findall(r"^\| (\d+), ([\d,]+) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 4
    for batch, length, cells in rows:
        cases = zip(cells.split(" | "), (0, 7, 42), (accepted[0], *accepted[1:] * 2), strict=True)
        for cell, moved, mean in cases:
            work = Workload(
                shape, HARDWARE["H200"], int(batch), int(length.replace(",", "")), KERNELS,
                schedule="unified", selection_bytes=moved,
            )  # fmt: skip
            got = expect(work, k=8, s=0.05, accepted=mean).speedup
            assert float(cell) == pytest.approx(got, abs=0.012)
