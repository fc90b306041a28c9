"""The page of the engine's speed has the figures of the records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from pillarattn.kernels.mixed_attention.tiles import default_tiles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engine_speed.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
# Each line of the table, and which record of its variant it is: the latest is 0.
LINES = {
    "compiled static decoding": ("baseline", 0),
    "engine, plain, cruising": ("plain", 0),
    "engine, plain, with plans": ("plain", 4),
    "engine, k = 8, lockstep": ("lockstep", 0),
    "engine, k = 8, each pass looked at first": ("speculative", 0),
    "engine, k = 8, delayed verification": ("delayed", 0),
    "engine, k = 7, cruising": ("cruise", 0),
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
    by_lt = [r for r in every if "CUBLASLT" in r.get("note", "")]
    usual = [r for r in every if r not in by_lt]
    found = {
        name: [r for r in usual if r["variant"] == variant][-1 - back]
        for name, (variant, back) in LINES.items()
    }
    found |= {
        "engine, plain, cruising, products by cuBLASLt": by_lt[0],
        "engine, k = 7, cruising, products by cuBLASLt": by_lt[1],
    }
    table = rows("An 8B model, long contexts")
    for name, one in found.items():
        assert table[name] == line(one)
        assert one["acceptance"] in (None, "replayed 0.77")
    for name, ours, theirs in (
        ("cruising / compiled static decoding", "k = 7, cruising", "compiled static decoding"),
        ("cruising / own plain, cruising", "k = 7, cruising", "plain, cruising"),
        ("own plain / compiled static decoding", "plain, cruising", "compiled static decoding"),
        ("cruising / delayed with plans", "k = 7, cruising", "k = 8, delayed verification"),
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
    # The three lines of one run come from it.
    assert (
        len({found[n]["commit"] for n in found if n.endswith((" cruising", "static decoding"))})
        == 1
    )
    between = [r for r in every if r["variant"] == "cruise" and r["commit"].startswith("aff401b")]
    seven, eight = sorted(between, key=lambda r: r["settings"]["k"])
    said = f"k = 8 took {eight['step_ms']:.2f} ms and one of k = 7 {seven['step_ms']:.2f}"
    assert said in PAGE.replace("\n", " ")


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
    benches = [
        r for r in every if r["kind"] == "engine-bench" and r["commit"].startswith("b85764c")
    ]
    assert [r["batch"] for r in benches] == [64, 256]
    gains, alike = [], []
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
            assert one["same_tokens"] == (name == "plain")
            if name.endswith("cruise"):
                gains.append(f"**{gain:.2f}**")
                alike.append((one["different_requests"], one["tokens_alike"] / bench["batch"]))
    assert f"{gains[0]} and {gains[1]}" in PAGE
    text = " ".join(PAGE.split())
    (run,) = benches[1]["variants"]["k=4 s=0.05 cruise"]["runs"]
    assert (
        f"ran for {run['all']['steps']:,} steps, and the last ended after {run['steps']:,}" in text
    )
    (few, first), (many, second) = alike
    said = f"{few} of 64 and {many} of 256, after {first:.0f} and {second:.0f} tokens on average"
    assert said in text


def test_the_end_of_a_closed_batch():
    """Before cruises reached the model's last position, and since."""
    every, text = records("engine_smollm2_h200.jsonl"), " ".join(PAGE.split())

    def ends(commit, batch):
        (run,) = (
            r["run"] for r in every
            if r["kind"] == "engine-bench-run" and r["commit"].startswith(commit)
            and r["batch"] == batch and r["variant"].endswith("cruise")
            and not r["settings"].get("queued")
        )  # fmt: skip
        whole = run["all"]
        later = (run["seconds"] - whole["seconds"]) / (run["steps"] - whole["steps"])
        return f"{1e3 * later:.2f}", f"{1e3 * whole['seconds'] / whole['steps']:.2f}"

    (before, together), (few, _) = ends("b08f250", 256), ends("b08f250", 64)
    assert (
        f"a step took {before} ms with 256 requests, where all of them together took {together}"
        in (text)
    )
    assert f"and {few} with 64." in text
    assert f"{ends('b85764c', 256)[0]} and {ends('b85764c', 64)[0]} ms, and" in text


@pytest.mark.parametrize(
    ("commit", "said"),
    [
        ("523d5ab", "{:,.0f} tokens a second plainly and {:,.0f} with drafts, **{:.2f}**"),
        ("b08f250", "it was {:,.0f} and {:,.0f}, {:.2f}."),
    ],
    ids=["now", "before"],
)
def test_the_queue(commit, said):
    (record,) = (
        r for r in records("engine_smollm2_h200.jsonl")
        if r["kind"] == "engine-bench" and r["settings"].get("queued") and r["batch"] == 64
        and r["commit"].startswith(commit)
    )  # fmt: skip
    plain, drafts = (record["variants"][n] for n in ("plain", "k=4 s=0.05 cruise"))
    text = " ".join(PAGE.split())
    assert (
        said.format(plain["tokens_per_second"], drafts["tokens_per_second"], drafts["speedup"])
        in text
    )
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert commit == "b08f250" or f"{drafts['speedup']:.2f} where a queue" in readme


def test_the_map():
    cells: dict[tuple[int, int], dict[str, dict]] = {}
    for one in records("engine_map_h200.jsonl"):
        if one["kind"] == "engine-shapes" and "step_ms" in one:
            cells.setdefault((one["batch"], one["length"]), {})[one["variant"]] = one
    # A step of more than a second has compiled.
    assert cells.pop((1, 2048))["cruise"]["most_step_ms"] > 1000
    section = PAGE.split("### Where drafts pay")[1].split("\n## ")[0]
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines() if line[:1] == "|"
    ]  # fmt: skip
    wanted, near = [], []
    for (batch, length), found in cells.items():
        plain, drafts = found["plain"], found["cruise"]
        gain = drafts["tokens_per_second"] / plain["tokens_per_second"]
        expected = drafts["predicted"]["kernels"]
        assert max(plain["most_step_ms"], drafts["most_step_ms"]) < 60
        steps = [f"{one['step_ms']:.2f}" for one in (plain, drafts)]
        wanted.append(
            [str(batch), f"{length:,}", *steps]
            + [f"{number:.2f}" for number in (gain, expected, gain / expected)]
        )
        near.append(gain / expected)
    assert shown[2:] == wanted
    text = " ".join(section.split())
    assert f"up to {100 * (1 - min(near)):.0f} % short" in text
    assert f"is {sum(one >= 0.85 for one in near)} of these {len(near)} cells" in text


def test_gaps_where_tokens_part():
    one = records("strict_engine_h200.jsonl")[0]
    found = one["default against plain"]
    said = "where they part the two tokens' logits are {:.2f} apart (median) and {:.2f} at most"
    assert said.format(found["median_gap"], found["largest_gap"]) in " ".join(PAGE.split())
    assert (
        f"{found['rows']} end otherwise" in PAGE and one["strict against strict plain"]["rows"] == 0
    )


def test_smollm2_shapes():
    every, shown = records("engine_smollm2_h200.jsonl"), rows("SmolLM2-135M, short contexts")
    shapes = [r for r in every if r["kind"] == "engine-shapes"]
    newest = list(dict.fromkeys(r["commit"] for r in shapes))[-2:]
    found = {}
    for one in shapes:
        way = "plain" if one["variant"] == "plain" else f"k = {one['settings']['k']}"
        if one["commit"] in newest:
            found[f"{one['batch']} requests of {one['length']:,}, {way}"] = line(one)
    assert len(found) == 6
    assert all(shown[name] == cells for name, cells in found.items())


@pytest.mark.parametrize("name", ["README.md", "docs/engine.md"])
def test_other_pages_quote_it(name):
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    factors = rows("An 8B model, long contexts")
    assert f"{factors['cruising / own plain, cruising'][0]} times its own plain decoding" in text
    assert re.search(
        rf"\b{factors['cruising / compiled static decoding'][0]} times (compiled|what)", text
    )
    real = rows("SmolLM2-135M, short contexts")
    for place in ("64 requests, 4,096 new tokens", "256 requests, 4,096 new tokens"):
        gain = real[f"{place}, k=4 cruise"][3].removesuffix("x")
        assert re.search(rf"\b{gain}\b", text)


SHAPES = {"8B": (32, 8, 128), "SmolLM2": (9, 3, 64)}


def parts(place, **wanted):
    """Return the µs of a layer of both parts, of a shape as the page names it and of some tiles."""
    name, batch, length, k = re.match(
        r"(\S+), (\d+) requests of ([\d,]+), k = (\d)", place
    ).groups()
    shape = dict(zip(("query_heads", "kv_heads", "dim"), SHAPES[name], strict=True)) | {
        "batch": int(batch), "length": int(length.replace(",", "")), "k": int(k),
    }  # fmt: skip
    every = [r for r in records("attention_tiles_h200.jsonl") if r["kind"] == "parts-sweep"]
    found = [
        r["median_us"] for r in every
        if r["part"] == "mixed" and shape.items() <= r["shape"].items()
        and r.get("score_dtype") in (None, "float32") and wanted.items() <= (r | r["tiles"]).items()
    ]  # fmt: skip
    return f"{found[-1]:.1f}"


def test_tiles():
    shown = rows("Tiles")
    ways = {place: cells for place, cells in shown.items() if len(cells) == 3 and "k =" in place}
    assert len(ways) == 3
    for place, cells in ways.items():
        tiles = {"split": 1280, "block_keys": 64, "warps": 2}
        if place.startswith("8B"):
            tiles = {"split": 2048, "block_keys": 64, "warps": 4, "scored_keys": 64}
        assert cells == [parts(place, scores=way, **tiles) for way in (None, "row", "pooled")]
    lengths = [
        int(n.replace(",", "")) for n in shown["`mixed_attention`, one layer, scores of each row"]
    ]
    splits = {
        place: cells
        for place, cells in shown.items()
        if place.endswith("splits") and len(cells) == 4
    }
    assert len(splits) == 3
    for place, cells in splits.items():
        assert cells == [
            parts(place, scores="row", split=n, block_keys=64, warps=2) for n in lengths
        ]


def test_default_splits_are_those_of_the_page():
    pool = torch.empty(4, 3, 64, dtype=torch.bfloat16, device="meta")
    query = torch.empty(4, 9, 64, dtype=torch.bfloat16, device="meta")
    found = [default_tiles(query, pool, pool, requests=n, most_rows=5) for n in (256, 64, 4)]
    assert "{:,} keys where requests are many, {} where they are fewer and {} where".format(
        *(tiles.split for tiles in found)
    ) in PAGE.replace("\n", " ")
    assert {tiles.block_rows for tiles in found} == {16}


def test_pooling_all_rows():
    every = [r for r in records("pooled_rows_h200.jsonl") if r["new_tokens"] == 1000]
    found = {(r["k"], r["rows"]): f"{r['accepted_per_round']:.2f}" for r in every}
    said = "{} of 4 drafts accepted a round where it was {}, and {} of 8 where it was {}".format(
        found[4, "all"], found[4, "standing"], found[8, "all"], found[8, "standing"]
    )
    assert said in PAGE.replace("\n", " ")


def test_beside_the_batching_of_transformers():
    every = [r for r in records("engine_peers_cpu.jsonl") if r["kind"] == "engine-peers"]
    found = {r["variant"]: r for r in every if "runs" in r}
    table = rows("Beside transformers' own batching, on a CPU")
    for name, variant in (
        ("`generate`, dynamic cache", "dynamic"), ("`generate_batch`", "batching"),
        ("engine, plain", "plain"), ("engine, k = 4", "speculative"),
    ):  # fmt: skip
        one, cells = found.pop(variant), []
        for kind in ("decode", "whole"):
            low, high = one[f"{kind}_spread"]
            cells += [
                f"{one[f'{kind}_tokens_per_second']:.1f} ({low:.1f}..{high:.1f})",
                f"{one['plain_over'][kind]:.2f}",
            ]
        assert table[name] == cells
        assert one["different_requests"] == 0
        assert one["environment"]["threads"] == 1
    assert not found
