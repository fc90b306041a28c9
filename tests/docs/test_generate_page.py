"""The page of `generate` has the figures of the records."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
VARIANTS = {
    "compiled": "baseline", "plain `generate`": "dynamic", "`k=0`": "plain",
    "`k=8`": "speculative", '`k="auto"`': "auto",
}  # fmt: skip
# Each cell of the table: shape, rows, prompt, and the commits whose records it may have.
CELLS = {
    "SmolLM2, 64 rows of 7,680": ("smollm2", 64, 7680, "3748c2f"),
    "1.7B, 16 rows of 8,192": ("1.7b", 16, 8192, "31936a8"),
    "1.7B, 1 row of 8,192": ("1.7b", 1, 8192, "31936a8"),
    "8B, 1 row of 16,384": ("8b", 1, 16384, "31936a8"),
    "the same, earlier code": ("8b", 1, 16384, "7e6294f"),
    "8B, 1 row of 32,768": ("8b", 1, 32768, "7e6294f"),
}


def records(name):
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def test_shapes_with_replayed_acceptance():
    section = PAGE.split("| | | ms a step or round |")[1].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[2:]]
    every = [one for one in records("generate_shapes_h200.jsonl") if "step_ms" in one]
    place, seen = None, set()
    for cells in lines:
        place = cells[0] or place
        shape, batch, length, commit = CELLS[place]
        (found,) = (
            one for one in every
            if (one["shape"], one["batch"], one["length"]) == (shape, batch, length)
            and one["commit"].startswith(commit) and one["variant"] == VARIANTS[cells[1]]
        )  # fmt: skip
        seen.add(place)
        assert cells[2] == f"{found['step_ms']:.2f}"
        assert cells[3].strip("*") == f"{found['tokens_per_second']:,.0f}"
        if "prompt_seconds" in found:
            assert cells[5] == f"{found['prompt_seconds']:.2f} s"
        assert cells[6] == f"{found['peak_bytes'] / 1e9:.1f} GB"
        assert found["acceptance"] in (None, "replayed 0.77")
        (base,) = (
            one["tokens_per_second"] for one in every
            if (one["shape"], one["batch"], one["length"]) == (shape, batch, length)
            and one["commit"] == found["commit"] and one["variant"] == "plain"
        )  # fmt: skip
        ratio = cells[4].strip("*").removesuffix("x")
        assert float(ratio) == round(found["tokens_per_second"] / base, 2)
    assert seen == set(CELLS)


def test_strict_mode_at_an_8b_shape():
    (one,) = records("strict_h200.jsonl")
    text = " ".join(PAGE.split("## Strict mode")[1].split("\n## ")[0].split())
    settings, default = one["settings"], one["default against k=0"]
    command = re.search(r"strict_equality --shape (\w+) --new-tokens (\d+) --k (\d+)", text)
    assert command.groups() == tuple(str(settings[name]) for name in ("shape", "new_tokens", "k"))
    assert f"{settings['batch']} prompts of {settings['length']} tokens" in text
    assert one["strict against strict k=0"]["rows"] == 0
    assert f"all {default['rows']} differ" in text
    places = default["places"]
    assert f"after {min(places)} to {max(places)} tokens" in text
    gaps = (default["median_gap"], default["largest_gap"])
    assert "{:.2f} apart (median) and {:.2f} at most".format(*gaps) in text
    seconds = [one["runs"][name]["decode_seconds"] for name in ("strict k=0", "k=0")]
    assert "{:.2f} s strictly and {:.2f} s by default".format(*seconds) in text


def test_the_gate_on_a_cpu() -> None:
    lines = (
        (RESULTS / "cpu_generate_smollm2_b1_auto.jsonl").read_text(encoding="utf-8").splitlines()
    )
    found: dict[str, list[str]] = {}
    for one in map(json.loads, lines[1:]):
        if one["kind"] == "speculative":
            assert one["k"] == "auto"
            found.setdefault(one["weights"], []).append(f"{one['ratio']:.2f}")
    own, rounded = (" and ".join(found[weights]) for weights in ("own", "int8"))
    text = " ".join(PAGE.split())
    assert f"{own} times plain with the model's weights" in text
    assert f"and {rounded} with int8" in text
