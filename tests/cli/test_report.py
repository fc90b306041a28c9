"""`pillarattn report`: tables on the screen, files in a folder, and readable mistakes."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from pillarattn.cli.report import report
from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.results import append_record
from pillarattn.evaluation.runner import Runner


def run(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(report)
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def results(byte_checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "a.jsonl"
    config = EvalConfig(
        model=str(byte_checkpoint), n=1, max_new_tokens=8, device="cpu", recall_tokens=6
    )
    append_record(path, Runner().run(config))
    return path


def test_without_a_folder_tables_are_printed(results):
    result = run(results)
    assert result.exit_code == 0, result.output
    assert "### Acceptance" in result.output
    assert "| worked_maths | pillar | 8 | 0.05 | 0 |" in result.output


def test_a_folder_gets_everything(results, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(results, "--out", tmp_path / "out", "--json", tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["measurements"] == 1
    assert found["tables"][0]["rows"][0]["strategy"] == "pillar"
    assert found["written"] == [line for line in result.output.splitlines() if line]
    assert {"report.md", "report.html", "acceptance.csv", "speed-up.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }


def test_formats_and_plots_can_be_left_out(results, tmp_path):
    result = run(results, "--out", tmp_path, "--format", "markdown", "--no-plots")
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "no results at 'none.jsonl'"),
        (["RESULTS", "--format", "pdf"], "--format takes markdown, csv, html, got 'pdf'"),
        (["RESULTS", "--format", ","], "--format takes"),
        (["RESULTS", "--json", "no/such/folder/x.json"], "does not exist"),
        (["EMPTY"], "nothing to report"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(results, tmp_path, arguments, message):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    names = {"RESULTS": str(results), "EMPTY": str(empty)}
    result = run(*(names.get(a, a) for a in arguments))
    assert result.exit_code == 2, result.output
    line = result.stderr.strip()
    assert line.startswith("Error: ")
    assert message in line
    assert "\n" not in line
