"""docs/ablation.md shows what the record holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pillarattn.modules.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ablation.md").read_text(encoding="utf-8")
RECORD = ROOT / "benchmarks" / "results" / "ablation_table_cpu.jsonl"


def test_the_tables_are_the_record():
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()[1:]]
    found = {(r["text"], r["label"], r["k"], r["s"]): r["mean_accepted"] for r in lines}
    shown = {}
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    for text, section in zip(("olympiadbench", "aime_generated"), sections, strict=True):
        head = re.search(r"^\| strategy \| (.*) \|$", section, re.MULTILINE)[1]
        settings = re.findall(r"k = (\d+), s = ([\d.]+)", head)
        for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE):
            for (k, s), cell in zip(settings, cells.split(" | "), strict=True):
                shown[text, name, int(k), float(s)] = cell
    assert shown == {key: f"{value:.2f}" for key, value in found.items()}
    assert {key[1] for key in shown} == set(STRATEGIES.names()) - {"full"}
