"""`pillarattn generate` on a tiny checkpoint: text, table, verdict, JSON, and readable mistakes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pillarattn.cli.main import app

PROMPT = " ".join(f"w{i}" for i in range(5, 45))
SMALL = ["--max-new-tokens", "10", "--k", "3", "--min-budget", "8", "--device", "cpu"]


def generate(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_both_runs_and_a_verdict_are_shown(tiny_checkpoint):
    result = generate("--model", tiny_checkpoint, "--prompt", PROMPT, *SMALL)
    assert result.exit_code == 0, result.output
    for words in (
        "Plain decoding",
        "Speculative decoding",
        "acceptance length",
        "keys read per draft step",
        "Speed-up:",
        "lossless (greedy): 10 new tokens in 1 row",
    ):
        assert words in result.output
    assert "\x1b" not in result.output
    assert "\r" not in result.output


def test_json_alone_is_on_stdout(tiny_checkpoint):
    result = generate("--model", tiny_checkpoint, "--prompt", PROMPT, *SMALL, "--json", "-")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["lossless"]["lossless"] is True
    assert record["prompt_tokens"] == 40
    assert record["stats"]["emitted"] == 9
    assert len(record["tokens"]) == 10
    assert "acceptance length" in result.stderr


def test_the_demo_measures_strategies_and_writes_a_file(tiny_checkpoint, tmp_path):
    path = tmp_path / "demo.json"
    result = generate(
        *("--model", tiny_checkpoint, "--demo", "--prompt-tokens", 120, *SMALL),
        *("--strategies", "full,uniform", "--json", path),
    )
    assert result.exit_code == 0, result.output
    assert "Acceptance by strategy" in result.output
    records = json.loads(path.read_text())["strategies"]
    assert [r["strategy"] for r in records] == ["full", "uniform"]


def test_a_prompt_may_come_from_a_file(tiny_checkpoint, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    result = generate("--model", tiny_checkpoint, "--prompt-file", path, *SMALL, "--no-plain")
    assert result.exit_code == 0, result.output
    assert "losslessness not checked: plain decoding was not run" in result.output
    assert "Speed-up" not in result.output


@pytest.mark.parametrize(
    ("seed", "verdict"), [(["--seed", 3], "lossless (seeded)"), ([], "not checked: sampling")]
)
def test_sampling_is_compared_with_a_seed_only(tiny_checkpoint, seed, verdict):
    result = generate(
        "--model", tiny_checkpoint, "--prompt", PROMPT, *SMALL, "--temperature", 0.7, *seed
    )
    assert result.exit_code == 0, result.output
    assert verdict in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", -1], "k must be an integer >= 0, got -1"),
        (["--s", 1.5], "0 < s <= 1, got 1.5"),
        (["--strategy", "best"], "unknown strategy 'best'"),
        (["--strategies", "pillar,best"], "unknown strategy 'best'"),
        (["--max-new-tokens", 0], "--max-new-tokens must be at least 1"),
        (["--prompt-tokens", 0], "--prompt-tokens must be at least 1"),
        (["--temperature", -1], "--temperature"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--device", "tpu9"], "device must be"),
        (["--demo"], "exactly one of --prompt"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
        (["--seed", -4], "seed must be an integer >= 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = generate("--prompt", "w5", *arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("Error: ")
    assert message in line
    assert "\n" not in line


def test_a_missing_prompt_file_is_named(tmp_path):
    result = generate("--prompt-file", tmp_path / "none.txt")
    assert result.exit_code == 2
    assert "none.txt' is not a file" in result.stderr


def test_an_empty_prompt_is_refused(tiny_checkpoint):
    result = generate("--model", tiny_checkpoint, "--prompt", "")
    assert result.exit_code == 2
    assert "no tokens" in result.stderr


def test_a_difference_is_shown_in_the_verdict(tiny_checkpoint, monkeypatch):
    # A drafter whose tokens are accepted unseen: the verdict has to say so.
    from pillarattn.evaluation import comparison

    honest = comparison.timed_generate

    def tampered(model, inputs, **options):
        tokens, times = honest(model, inputs, **options)
        if options.get("assistant") is not None:
            tokens = tokens.clone()
            tokens[0, -1] = (tokens[0, -1] + 1) % 97
        return tokens, times

    monkeypatch.setattr(comparison, "timed_generate", tampered)
    result = generate("--model", tiny_checkpoint, "--prompt", PROMPT, *SMALL)
    assert "NOT LOSSLESS (greedy)" in result.output
    assert "at new token 9" in result.output
