"""`pillarattn probe` on a tiny checkpoint: tables, JSON, a saved record, and readable mistakes."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from pillarattn.cli.probe import probe
from pillarattn.evaluation.probe_table import Table

WORDS = " ".join(f"w{2 + i * i % 95}" for i in range(90))
SMALL = ["--start", 40, "--tokens", 80, "--k", "3", "--min-budget", 8, "--device", "cpu"]

app = typer.Typer()
app.command()(probe)


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return path


def test_tables_for_people(tiny_checkpoint, words):
    result = run(
        *("--model", tiny_checkpoint, "--text", words, *SMALL),
        *("--strategies", "pillar, full", "--s", "0.1,0.2", "--positions"),
    )
    assert result.exit_code == 0, result.output
    for part in (
        "80 tokens, rounds from 40 on, temperature 0.6, 4 configurations on cpu (float32)",
        "Acceptance on 80 tokens (probe)",
        "Share of rounds that accept draft j",
        "Accepted drafts by context length",
        "32-63",
        "pillar s=0.2",
        "10 rounds in",
    ):
        assert part in result.output, result.output
    assert "3.00 ± 0.00" in result.output  # full
    assert "\x1b" not in result.output and "\r" not in result.output


def test_json_alone_is_on_stdout_and_the_record_is_saved(tiny_checkpoint, tmp_path):
    data, path = tmp_path / "problems.jsonl", tmp_path / "out" / "probe.jsonl"
    problem = {"question": WORDS, "solution": [WORDS]}
    data.write_text(json.dumps(problem) + "\n")
    result = run(
        *("--model", tiny_checkpoint, "--dataset", data, *SMALL, "--temperature", 0),
        *("--strategies", "streaming", "--json", "-", "--save", path, "--per-round"),
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["records"][0]["strategy"] == "streaming"
    assert shown["about"]["text"] == str(data) and shown["about"]["tokens"] == 80
    assert len(shown["records"][0]["accepted_per_round"]) == shown["records"][0]["rounds"]
    assert "Acceptance on" in result.stderr
    assert Table.load(path).to_dict() == shown


def test_a_strategy_of_ones_own(tiny_checkpoint, words, tmp_path, monkeypatch):
    from pillarattn.modules.strategies import STRATEGIES

    (tmp_path / "my_strategies.py").write_text(
        "from pillarattn.modules.strategies import RankedStrategy, register_strategy\n"
        "@register_strategy('oldest')\n"
        "class Oldest(RankedStrategy):\n"
        "    needs_scores = False\n"
        "    def rank(self, request):\n"
        "        return -request.positions()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        result = run(
            *("--model", tiny_checkpoint, "--text", words, *SMALL),
            *("--import", "my_strategies", "--strategies", "oldest"),
        )
    finally:
        STRATEGIES._classes.pop("oldest", None)
    assert result.exit_code == 0, result.output
    assert "oldest" in result.output


def test_the_librarys_own_text(tiny_checkpoint):
    result = run("--model", tiny_checkpoint, *SMALL, "--strategies", "streaming")
    assert result.exit_code == 0, result.output
    assert "streaming" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "x"], "--k takes numbers with commas, got 'x'"),
        (["--k", "2.5"], "--k takes whole numbers"),
        (["--k", "0"], "k >= 1"),
        (["--s", "0.1,2"], "0 < s <= 1, got 2.0"),
        (["--strategies", "pillar,best"], "unknown strategy 'best'"),
        (["--strategies", ","], "--strategies names none"),
        (["--temperature", -1], "temperature must be 0"),
        (["--start", 0], "start must be at least 1"),
        (["--start", 79], "too few for a round"),
        (["--tokens", 0], "max_tokens must be at least 1"),
        (["--parity", "exact"], "parity must be one of"),
        (["--device", "tpu9"], "device must be"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--text", "no/such/file"], "--text: 'no/such/file' is not a file"),
        (["--dataset", "no.jsonl"], "not both"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
        (["--import", "no_such_module"], "no_such_module"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tiny_checkpoint, words, arguments, message):
    result = run("--model", tiny_checkpoint, "--text", words, *SMALL, *arguments)
    assert result.exit_code == 2, result.output
    line = [line for line in result.stderr.strip().splitlines() if line.startswith("Error: ")]
    assert len(line) == 1 and message in line[0]
