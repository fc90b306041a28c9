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
NAMES = {
    "compiled static decoding": "baseline",
    "engine, plain": "plain",
    "engine, k = 8, lockstep": "lockstep",
    "engine, k = 8": "speculative",
    "engine, k = 8, delayed verification": "delayed",
}


def records(name):
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def rows(heading):
    """Return the cells of the tables of a section, by the first cell."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_8b_shape():
    # The later run; the first one is there for what row scores took.
    found = {r["variant"]: r for r in records("engine_8b_h200.jsonl")}
    table = rows("An 8B model, long contexts")
    for name, variant in NAMES.items():
        one = found[variant]
        assert table[name] == [
            f"{one['step_ms']:.2f}", f"{one['tokens_per_step']:.1f}",
            f"{one['tokens_per_second']:,.0f}", f"{one['busy_share']:.2f}",
        ]  # fmt: skip
        assert one["acceptance"] in (None, "replayed 0.77")
    speed = {name: one.get("tokens_per_second") for name, one in found.items()}
    for name, ours, theirs in (
        ("delayed / compiled static decoding", "delayed", "baseline"),
        ("delayed / own plain", "delayed", "plain"),
        ("own plain / compiled static decoding", "plain", "baseline"),
        ("delayed / synchronous", "delayed", "speculative"),
        ("unified / lockstep", "speculative", "lockstep"),
    ):
        assert table[name][0] == f"{speed[ours] / speed[theirs]:.2f}"


def test_smollm2():
    (record,) = records("engine_smollm2_h200.jsonl")
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
