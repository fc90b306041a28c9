"""`pillarattn evaluate` on a tiny checkpoint: figures, verdict, records, and readable mistakes."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from pillarattn.cli.evaluate import evaluate
from pillarattn.evaluation.results import read_records

SMALL = ["--n", "2", "--max-new-tokens", "10", "--k", "3", "--device", "cpu",
         "--option", "min_budget=8", "--recall-tokens", "8"]  # fmt: skip


def run(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(evaluate)
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_figures_and_a_verdict_are_shown(byte_checkpoint, tmp_path):
    out = tmp_path / "runs" / "a.jsonl"
    result = run("--model", byte_checkpoint, *SMALL, "--out", out)
    assert result.exit_code == 0, result.output
    for words in (
        "worked_maths pillar k=3 s=0.05 T=0",
        "acceptance length",
        "KV read per token",
        "attention-mass recall",
        "speed-up",
        "lossless (greedy): 20 new tokens in 2 rows",
    ):
        assert words in result.output
    assert "\x1b" not in result.output
    (record,) = read_records(out)
    assert record["config"]["options"] == {"min_budget": 8}
    assert "text" not in record["examples"][0]
    run("--model", byte_checkpoint, *SMALL, "--seed", "1", "--out", out)
    assert len(read_records(out)) == 2


def test_json_alone_is_on_stdout(byte_checkpoint, tmp_path):
    data = tmp_path / "a.txt"
    data.write_text("Once upon a time")
    result = run(
        "--model", byte_checkpoint, "--task", "text", "--data", data, *SMALL, "--keep-texts",
        "--temperature", "0.8", "--no-plain", "--lossless", "off", "--drafter", "sparse",
        "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["config"]["temperature"] == 0.8
    assert record["examples"][0]["text"]
    assert record["lossless"] is None
    assert "losslessness not checked" in result.stderr
    assert "not judged, 1 problems" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "-1"], "k must be"),
        (["--s", "1.5"], "0 < s <= 1, got 1.5"),
        (["--strategy", "best"], "unknown strategy 'best'"),
        (["--task", "best"], "unknown task 'best'"),
        (["--option", "min_budget"], "--option takes NAME=VALUE"),
        (["--option", "budget=3"], "unknown PillarConfig option 'budget'"),
        (["--n", "0"], "n must be an integer >= 1"),
        (["--lossless", "maybe"], "lossless must be one of"),
        (["--temperature", "-1"], "temperature must be"),
        (["--data", "none.jsonl"], "none.jsonl' does not exist"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
        (["--import", "no_such_module"], "no_such_module"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = run("--device", "cpu", *arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("Error: ")
    assert message in line
    assert "\n" not in line


def test_a_prompt_that_is_too_long_is_a_mistake_too(byte_checkpoint):
    result = run("--model", byte_checkpoint, *SMALL, "--max-new-tokens", "4000")
    assert result.exit_code == 2
    assert "exceeds the model's 2048 positions" in result.stderr


def test_help_names_every_option():
    text = CliRunner().invoke(_app(), ["--help"], env={"COLUMNS": "200"}).output
    for option in ("--allow-code-execution", "--context-tokens", "--lossless", "--recall-tokens"):
        assert option in text


def _app():
    app = typer.Typer()
    app.command()(evaluate)
    return app
