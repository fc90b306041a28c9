"""The page of the engine's speed has the figures of the records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from pillarattn.kernels.mixed_attention.tiles import PROGRAMS, default_tiles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engine_speed.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
# Each line of the table, and which record of its variant it is: the latest is 0.
LINES = {
    "compiled static decoding": ("baseline", 0),
    "engine, plain, cruising": ("plain", 0),
    "engine, plain, with plans": ("plain", 1),
    "engine, k = 8, lockstep": ("lockstep", 0),
    "engine, k = 8, each pass looked at first": ("speculative", 0),
    "engine, k = 8, delayed verification": ("delayed", 0),
    "engine, k = 8, cruising": ("cruise", 0),
}


def records(name):
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def rows(heading):
    """Return the cells of the tables of a section, by the first cell."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def line(one):
    """Return what a table says of a record."""
    return [
        f"{one['step_ms']:.2f}", f"{one['tokens_per_step']:.1f}",
        f"{one['tokens_per_second']:,.0f}", f"{one['busy_share']:.2f}",
    ]  # fmt: skip


def test_the_8b_shape():
    every = [r for r in records("engine_8b_h200.jsonl") if "tokens_per_second" in r]
    found = {
        name: [r for r in every if r["variant"] == variant][-1 - back]
        for name, (variant, back) in LINES.items()
    }
    table = rows("An 8B model, long contexts")
    for name, one in found.items():
        assert table[name] == line(one)
        assert one["acceptance"] in (None, "replayed 0.77")
    for name, ours, theirs in (
        ("cruising / compiled static decoding", "k = 8, cruising", "compiled static decoding"),
        ("cruising / own plain, cruising", "k = 8, cruising", "plain, cruising"),
        ("own plain / compiled static decoding", "plain, cruising", "compiled static decoding"),
        ("cruising / delayed with plans", "k = 8, cruising", "k = 8, delayed verification"),
        (
            "delayed with plans / each pass looked at first",
            "k = 8, delayed verification",
            "k = 8, each pass looked at first",
        ),
        ("unified / lockstep", "k = 8, each pass looked at first", "k = 8, lockstep"),
    ):
        speeds = [
            next(r for n, r in found.items() if n.endswith(end))["tokens_per_second"]
            for end in (ours, theirs)
        ]
        assert table[name][0] == f"{speeds[0] / speeds[1]:.2f}"
    # All that one run compares comes from it.
    commits = {found[n]["commit"] for n in found if n.endswith(("cruising", "static decoding"))}
    assert len(commits) == 1


def test_smollm2():
    record = records("engine_smollm2_h200.jsonl")[0]
    table = rows("SmolLM2-135M, short contexts")
    for name, one in record["variants"].items():
        (run,) = one["runs"]
        accepted = f"{run['mean_accepted']:.2f}" if run["rounds"] and run["mean_accepted"] else ""
        assert table[name] == [
            f"{1000 * run['seconds'] / run['steps']:.2f}", f"{one['tokens_per_second']:,.0f}",
            f"{one['speedup']:.2f}x", accepted,
        ]  # fmt: skip
    same = [one["same_tokens"] for one in record["variants"].values()]
    assert (same.count(True), same.count(False)) == (5, 0)
    assert f"{64 * 768:,} tokens" in PAGE


def test_smollm2_cruising():
    every = records("engine_smollm2_h200.jsonl")
    table = rows("SmolLM2-135M, short contexts")
    short = next(r for r in every if r["kind"] == "engine-bench" and "cruise" in r["settings"])
    plain, drafts = short["variants"]["plain"], short["variants"]["k=4 s=0.05 cruise"]
    (run,) = plain["runs"]
    assert table["plain, 512 new tokens"] == [
        f"{1000 * run['seconds'] / run['steps']:.2f}", f"{plain['tokens_per_second']:,.0f}",
    ]  # fmt: skip
    assert plain["same_tokens"] and drafts["same_tokens"]
    assert f"{drafts['tokens_per_second']:,.0f}\ntokens a second" in PAGE
    (long,) = (r for r in every if r["kind"] == "engine-stretches")
    found = {(f"{s['step_ms']:.2f}", f"{s['tokens_per_second']:,}") for s in long["stretches"]}
    shown = [tuple(cells) for name, cells in table.items() if name.startswith("k = 4, at")]
    assert len(shown) == 3 and set(shown) <= found
    fastest = {s["steps"]: s for s in long["stretches"]}[300]["tokens_per_second"]
    assert f"**{fastest / plain['tokens_per_second']:.2f}**" in PAGE
    many = {r["variant"]: r for r in every if r["kind"].startswith("engine-shapes")}
    assert table["256 requests, plain"] == line(many["plain"])
    assert table["256 requests, k = 8"] == line(many["cruise"])
    assert f"{many['ratios']['ratios']['cruise / plain']:.2f} times plain decoding" in PAGE


def test_tiles():
    chosen = [r for r in records("attention_tiles_h200.jsonl") if r.get("is_default_now")]
    wanted = {(f"{r['default_us']:.1f} µs", f"{r['median_us']:.1f} µs") for r in chosen}
    found = {tuple(cells) for cells in rows("Tiles").values() if re.match(r"[\d.]+ µs", cells[0])}
    assert len(found) == 5
    assert found <= wanted
    for record in chosen:
        shape, tiles = record["shape"], dict(record["tiles"])
        query, pool = (
            torch.empty(4, shape[heads], shape["dim"], dtype=torch.bfloat16, device="meta")
            for heads in ("query_heads", "kv_heads")
        )
        assert tiles.pop("programs_per_multiprocessor") == PROGRAMS
        default = default_tiles(query, pool, pool)
        assert tiles == {
            "block_rows": default.block_rows, "block_keys": default.block_keys,
            "warps": default.warps, "stages": default.stages, "split": default.split,
        }  # fmt: skip
