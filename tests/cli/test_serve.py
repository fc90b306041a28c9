"""`pillarattn serve`: what it runs, and what it says without the extra."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pillarattn.cli import serve
from pillarattn.cli.main import app


def test_it_runs_the_application_of_the_model(byte_checkpoint, monkeypatch):
    pytest.importorskip("fastapi", reason="the extra pillarattn[serve] is not installed")
    uvicorn = pytest.importorskip("uvicorn", reason="the extra pillarattn[serve] is not installed")
    runs = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: runs.append((app, options)))
    arguments = [
        "serve", str(byte_checkpoint), "--port", "8123", "--k", "3", "--model-name", "tiny",
        "--kv-tokens", "512", "--device", "cpu", "--auto",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    ((served, options),) = runs
    assert options["port"] == 8123 and options["host"] == "127.0.0.1"
    assert served.title == "pillarattn"
    assert "http://127.0.0.1:8123/v1" in result.output


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "needs fastapi and uvicorn; pip install 'pillarattn[serve]'" in result.output


def test_a_wrong_value_is_one_line(monkeypatch):
    monkeypatch.setattr(serve, "_framework", lambda: (None, None))
    result = CliRunner().invoke(app, ["serve", "--eviction", "oldest"])
    assert result.exit_code == 2
    assert "eviction must be one of" in result.output


def test_help_says_what_the_name_is_without_the_option():
    words = CliRunner().invoke(app, ["serve", "--help"]).output.replace("│", " ").split()
    assert "Name that clients ask for; MODEL without it." in " ".join(words)


def test_a_port_that_there_is_not_is_refused_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(serve, "load_model", lambda *a, **k: pytest.fail("loaded the model"))
    result = CliRunner().invoke(app, ["serve", "--port", "65536"])
    assert result.exit_code == 2
    assert "--port" in result.output and "65535" in result.output
