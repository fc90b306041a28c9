"""`pillarattn sweep`: grids from files and options, resumed, with failures named."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from pillarattn.cli.sweep import sweep
from pillarattn.evaluation.results import read_records
from pillarattn.evaluation.runner import Runner

SMALL = ["--set", "n=1", "--set", "max_new_tokens=8", "--set", "device=cpu",
         "--set", "recall_tokens=0", "--set", "options.min_budget=8"]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(sweep)
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_grid_is_run_and_resumed(byte_checkpoint, tmp_path):
    call = ["--grid", "strategy=pillar,full", "--set", f"model={byte_checkpoint}", *SMALL,
            "--out", tmp_path / "out"]  # fmt: skip
    result = run(*call)
    assert result.exit_code == 0, result.output
    assert "2 cells to run" in result.output
    assert result.output.count(" accepted (") == 2
    assert len(read_records(tmp_path / "out")) == 2
    again = run(*call, "--grid", "k=8,4", "--json", "-")
    assert again.exit_code == 0, again.output
    assert "2 cells to run, 2 done before" in again.stderr
    found = json.loads(again.stdout)
    assert (found["cells"], found["failed"]) == (4, 0)
    assert [(r["config"]["strategy"], r["config"]["k"]) for r in found["records"]] == [
        ("pillar", 8),
        ("pillar", 4),
        ("full", 8),
        ("full", 4),
    ]
    assert all(r["lossless"]["lossless"] for r in found["records"])


def test_a_failing_cell_is_named_and_the_exit_code_says_so(tmp_path, monkeypatch):
    def fail(runner, config, *, on_batch=None):
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr(Runner, "run", fail)
    result = run("--grid", "k=4,8", *SMALL, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.output.count("RuntimeError: no memory at all") == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    result = run("--grid", "k=4,8", *SMALL, "--out", tmp_path)
    assert result.exit_code == 0
    assert "[1/2] 1 cell to run" in result.output


def test_a_file_is_read_and_overridden(tmp_path):
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"base": {"k": 4, "n": 9}, "grid": {"s": [0.1, 0.2]}}))
    result = run(path, "--set", "n=3", "--grid", "s=0.3", "--dry-run", "--json", "-")
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(result.stdout)["cells"]
    assert (cell["config"]["k"], cell["config"]["n"], cell["config"]["s"]) == (4, 3, 0.3)
    assert cell["hash"] in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a sweep FILE, or at least one --grid"),
        (["none.yaml"], "none.yaml' does not exist"),
        (["--grid", "k"], "--grid takes NAME=VALUE,VALUE"),
        (["--grid", "k=4", "--set", "n"], "--set takes NAME=VALUE"),
        (["--grid", "strategy=pillar,best"], "unknown strategy 'best'"),
        (["--grid", "budget=3"], "unknown option 'budget'"),
        (["--grid", "k=4", "--set", "run_code=true"], "confirm it with --allow-code-execution"),
        (["--grid", "k=4", "--json", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    result = run(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("Error: ")
    assert message in line
    assert "\n" not in line
    assert not (tmp_path / "out").exists()


def test_code_runs_only_if_it_was_confirmed():
    result = run("--grid", "k=4", "--allow-code-execution", "--dry-run", "--json", "-")
    assert json.loads(result.stdout)["cells"][0]["config"]["run_code"] is True


def test_results_that_cannot_be_read_are_a_mistake(tmp_path):
    (tmp_path / "results.jsonl").write_text("{nonsense\n")
    result = run("--grid", "k=4", "--out", tmp_path)
    assert result.exit_code == 2
    assert "line 1: not JSON" in result.stderr
