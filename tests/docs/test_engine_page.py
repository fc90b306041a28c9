"""The engine's page names every parameter and policy, and its figures are those of the records."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pillarattn.engine.config import PREFILL_CHUNKS, STRICT_CHUNK, EngineConfig
from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.request import SamplingParams

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def records(name):
    """Return the records of a file but for the first, which says where they come from."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][1:]


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams)])
def test_every_parameter_is_there(name):
    assert re.search(rf"^\|.*`{name}`", PAGE, re.M)


def test_every_policy_is_there():
    assert re.findall(r'^\| `"(\w+)"` \|', PAGE, re.M) != []
    assert sorted(re.findall(r'^\| `"(\w+)"` \|', PAGE, re.M)) == EVICTION_POLICIES.names()


def test_the_simulated_figures_are_those_of_the_record():
    table = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[1].replace(",", "").isdigit():
            table[cells[0].split(" ")[0]] = [int(cell.replace(",", "")) for cell in cells[1:]]
    wanted = {}
    for record in sorted(records("offload_simulated.jsonl"), key=lambda r: r["machine"]["link"]):
        figures = (record["tokens_per_second"], record["stall_seconds"], record["bytes_out"] / 1e9)
        wanted.setdefault(record["policy"], []).extend(round(figure) for figure in figures)
    assert table == wanted


def test_the_figures_of_the_small_pool_are_those_of_the_record():
    lines = (RESULTS / "engine_offload_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    runs = {one["variant"]: one for one in map(json.loads, lines) if "variant" in one}
    steps = runs["reserve"]["steps"]
    wanted = {
        name: (
            str(one["steps"]), f"{steps / one['steps']:.2f}", str(one["stalled_steps"]),
            f"{one['bytes_out'] / 1e6:.1f}", str(one["evictions"]),
            str(one["recomputed_tokens"]), f"{one['mean_accepted']:.2f}",
        )
        for name, one in runs.items()
    }  # fmt: skip
    assert {"room", "reserve", *EVICTION_POLICIES.names()} <= set(wanted)
    assert {one["different_requests"] for one in runs.values()} == {0}
    section = PAGE.split("### In the engine itself")[1].split("\n##")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    table = {name.strip(): tuple(cell.strip() for cell in cells) for name, *cells in rows[2:]}
    assert table == wanted
    text = " ".join(section.split())
    assert f"{steps / runs['heat']['steps']:.2f} times fewer with `heat`" in text
    assert f"{runs['room']['tokens']} new ones together" in text
    assert f"a pool of {runs['reserve']['kv_tokens']} tokens" in text
    least = min(("heat", "lifo", "fifo", "lru", "shortest"), key=lambda n: runs[n]["stalled_steps"])
    assert least == "heat"


def test_the_small_pool_of_a_gpu():
    lines = (RESULTS / "engine_offload_h200.jsonl").read_text(encoding="utf-8").splitlines()
    runs = {one["variant"]: one for one in map(json.loads, lines)}
    base = runs["reserve"]["tokens_per_second"]
    wanted = {
        name: [
            f"{one['tokens_per_second']:,.0f}", f"{one['tokens_per_second'] / base:.2f}",
            f"{one['steps']:,}", f"{one['mean_acting']:.1f}", f"{one['stalled_steps']:,}",
            f"{one['bytes_out'] / 1e6:,.1f}", str(one["evictions"]), f"{one['mean_accepted']:.2f}",
        ]
        for name, one in runs.items()
    }  # fmt: skip
    section = PAGE.split("### On one H200")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    table = {n.strip(): [cell.strip(" *") for cell in cells] for n, *cells in rows[2:]}
    assert table == wanted
    different = [one["different_requests"] for one in runs.values()]
    assert f"{min(different)} to {max(different)} requests end in other" in " ".join(
        section.split()
    )


def test_strict_mode_of_a_gpu():
    lines = (RESULTS / "strict_engine_h200.jsonl").read_text(encoding="utf-8").splitlines()
    section = PAGE.split("## Strict mode")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    table: dict[str, list[str]] = {}
    for name, *cells in rows:
        table.setdefault(name.strip().split(",")[0], []).extend(
            c.replace("*", "").strip() for c in cells
        )
    for one, name in zip(map(json.loads, lines), ("SmolLM2-135M", "8B shape"), strict=True):
        pairs = ("strict against strict plain", "strict against strict plain, alone",
                 "default against plain")  # fmt: skip
        found = [f"{one[pair]['rows']} of {one[pair]['of']}" for pair in pairs]
        found += [
            f"{1e3 * run['seconds'] / run['steps']:.2f}"
            for run in (one["runs"][n] for n in ("strict plain", "plain", "strict", "default"))
        ]
        assert table[name] == found
        assert one["strict against strict plain"]["rows"] == 0


def test_the_shares_of_blocks_are_those_of_the_record():
    table = {}
    for size, *shares in re.findall(r"^\| (\d+) tokens? \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.M):
        table[int(size)] = [float(share) for share in shares]
    rounds = records("blocks_read_smollm2_cpu.jsonl")
    assert len(rounds) == 9 * 3
    wanted = {}
    for size in (1, 16, 64):
        mine = [r for r in rounds if r["block_size"] == size]
        wanted[size] = [
            round(sum(r[name] for r in mine) / len(mine), 3)
            for name in ("share_one_layer", "share_all_layers")
        ]
    assert table == wanted


@pytest.mark.parametrize("one", fields(EngineConfig), ids=lambda one: one.name)
def test_every_setting_of_an_engine_has_a_line(one):
    section = PAGE.split("## Settings")[1].split("\n## ")[0]
    (line,) = (
        row for row in section.splitlines()
        if row.startswith("| `") and f"`{one.name}`" in row.split("|")[1]
    )  # fmt: skip
    shown = line.split("|")[2].strip().strip("`").replace('"', "").split(", ")
    if one.name == "prefill_chunk":
        usual = "512 on a CPU, 2,048 on a GPU, 256 in strict mode"
        assert usual in line
        assert (*PREFILL_CHUNKS, STRICT_CHUNK) == (512, 2048, 256)
    elif one.default is not None and not callable(one.default_factory):
        assert str(one.default) in shown
