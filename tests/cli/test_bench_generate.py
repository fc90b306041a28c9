"""`pillarattn bench generate` on a tiny checkpoint: records, tables, resuming, mistakes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pillarattn.cli.main import app

TINY = [
    "--batch", "1,2", "--length", "40", "--new-tokens", 24, "--fixed", "3:0.2", "--min-budget", 8,
    "--repeats", 1, "--check-tokens", 8, "--device", "cpu",
]  # fmt: skip


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "generate", *map(str, arguments)])


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cells_are_measured_shown_and_not_measured_twice(tiny_checkpoint, tmp_path):
    out, plot, both = tmp_path / "bench.jsonl", tmp_path / "bench.png", tmp_path / "all.json"
    arguments = ["--model", tiny_checkpoint, *TINY, "--out", out]
    result = bench(*arguments, "--plot", plot, "--json", both)
    assert result.exit_code == 0, result.output
    for words in ("B=1, L=40: measuring", "Decode speed", "k=3 s=0.2", "k=auto s=auto",
                  "Where the decode's time goes", "the gate"):  # fmt: skip
        assert words in result.output
    assert "\x1b" not in result.output
    assert plot.stat().st_size > 1000
    records = records_of(out)
    assert [(r["batch"], r["length"]) for r in records] == [(1, 40), (2, 40)]
    assert json.loads(both.read_text())["cells"] == records
    for record in records:
        names = [one["name"] for one in record["variants"]]
        assert names == ["plain", "k=3 s=0.2", "k=auto s=auto"]
        plain, fixed, auto = record["variants"]
        assert plain["decode_speedup"] == 1.0
        assert fixed["lossless"]["lossless"] is auto["lossless"]["lossless"] is True
        assert fixed["same_tokens"] is auto["same_tokens"] is True
        assert fixed["decoded_tokens"] == record["batch"] * 23
        assert sum(fixed["profile"].values()) == pytest.approx(1.0, abs=0.05)
        assert set(fixed["profile"]) == {"draft", "verify", "select", "accept", "rest"}
        assert fixed["stats"]["plain_rounds"] < fixed["stats"]["rounds"]
        # The first run knew nothing; those that are timed have what it learnt.
        assert auto["warm_up"]["stats"]["decisions"][0]["reason"] == "measure plain"
        assert auto["stats"]["decisions"]
        assert plain["stats"] is None
        assert 0 < auto["share_of_best"] <= auto["decode_speedup"]
        assert record["best_fixed"] == "k=3 s=0.2"
        assert record["environment"]["threads"] >= 1
    again = bench(*arguments)
    assert again.exit_code == 0, again.output
    assert again.output.count("measured before") == 2
    assert records_of(out) == records
    more = bench(*arguments, "--length", "40,50")
    assert more.exit_code == 0, more.output
    assert len(records_of(out)) == 4
    assert records_of(out)[:2] == records


@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", 0.8],
        ["--temperature", 0.8, "--seed", 4, "--shared-prompt"],
        ["--reuse-prompt", "--no-auto"],
        ["--reuse-prompt", "--temperature", 0.8],
        ["--static", "--fixed", ""],
        ["--strategy", "h2o", "--auto-s", 0.3],
    ],
)
def test_other_ways_to_run(tiny_checkpoint, options):
    result = bench("--model", tiny_checkpoint, *TINY, *options, "--batch", 2, "--json", "-")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)["cells"]
    for one in record["variants"]:
        assert one["decode_tokens_per_second"] > 0
        if one["k"] is not None:
            assert one["lossless"]["lossless"] is True
    assert "Decode speed" in result.stderr
    if "--static" in options:
        assert record["variants"][1]["name"] == "static + compile"
        assert record["variants"][1]["decode_speedup_over_static"] == 1.0
        assert record["best_fixed"] is None
        assert "of the best of plain\n" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,x"], "--batch takes whole numbers with commas, got '1,x'"),
        (["--batch", "0"], "--batch takes numbers >= 1"),
        (["--length", ""], "--length takes numbers >= 1"),
        (["--fixed", "8"], "--fixed takes K:S with commas, such as 8:0.05, got '8'"),
        (["--fixed", "8:2"], "0 < s <= 1, got 2.0"),
        (["--auto-s", "much"], "s must be a number with 0 < s <= 1, got 'much'"),
        (["--new-tokens", 1], "--new-tokens must be at least 2"),
        (["--repeats", 0], "--repeats must be at least 1"),
        (["--temperature", -1], "--temperature must be 0"),
        (["--static", "--reuse-prompt"], "--static makes a cache of its own"),
        (["--strategy", "best"], "unknown strategy 'best'"),
        (["--threads", 0], "--threads must be at least 1"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
        (["--device", "tpu9"], "device must be"),
        (["--plot", "x.png", "--no-auto"], "--plot draws what the gate reached"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("Error: ")
    assert message in line
    assert "\n" not in line


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"kind": "evaluation"}\n')
    result = bench("--out", path)
    assert result.exit_code == 2
    assert "not a record of `bench generate`" in result.stderr
    assert bench("--out", tmp_path).exit_code == 2


def test_generate_takes_auto(tiny_checkpoint):
    prompt = " ".join(f"w{i}" for i in range(5, 45))
    result = CliRunner().invoke(
        app,
        ["generate", "--model", str(tiny_checkpoint), "--prompt", prompt, "--max-new-tokens", "80",
         "--k", "auto", "--s", "auto", "--min-budget", "8", "--device", "cpu", "--json", "-"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["config"]["k"] == "auto"
    assert record["lossless"]["lossless"] is True
    assert record["stats"]["decisions"]
