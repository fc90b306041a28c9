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
    "engine, plain, with plans": ("plain", 2),
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
    # The two lines of one run come from it.
    assert len({found[n]["commit"] for n in found if n.endswith("cruising")}) == 1
    others = [f"{r['step_ms']:.2f}" for r in every if r["variant"] == "baseline"]
    assert "took\n{}, {} and {} ms".format(*reversed(others)) in PAGE


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
    every, shown = records("engine_smollm2_h200.jsonl"), rows("SmolLM2-135M, short contexts")
    benches = [r for r in every if any(name.endswith("auto") for name in r.get("variants", ()))]
    assert [r["batch"] for r in benches] == [64, 256]
    gains = []
    for bench in benches:
        new, plain = bench["settings"]["new_tokens"], bench["variants"]["plain"]
        for name, one in bench["variants"].items():
            gain = one["all_tokens_per_second"] / plain["all_tokens_per_second"]
            (run,) = one["runs"]
            place = f"{bench['batch']} requests, {new:,} new tokens, {name.replace(' s=0.05', '')}"
            assert shown[place] == [
                f"{one['tokens_per_second']:,.0f}", f"{one['speedup']:.2f}x",
                f"{one['all_tokens_per_second']:,.0f}", f"{gain:.2f}x",
                f"{run['mean_accepted']:.2f}" if run["mean_accepted"] else "",
            ]  # fmt: skip
            assert one["same_tokens"]
            gains += [f"**{gain:.2f}**"] if name.endswith("cruise") else []
    assert f"{gains[0]} and {gains[1]}" in PAGE
    (run,) = benches[1]["variants"]["k=6 s=0.05 cruise"]["runs"]
    assert f"{run['all']['steps']:,} steps, and the last ended after {run['steps']:,}" in PAGE


def test_smollm2_shapes():
    every, shown = records("engine_smollm2_h200.jsonl"), rows("SmolLM2-135M, short contexts")
    newest = [r["commit"] for r in every if r["kind"] == "engine-shapes"][-1]
    found = [r for r in every if r["kind"] == "engine-shapes" and r["commit"] == newest]
    assert len(found) == 8
    for one in found:
        way = "plain" if one["variant"] == "plain" else f"k = {one['settings']['k']}"
        assert shown[f"{one['batch']} requests of {one['length']:,}, {way}"] == line(one)


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
