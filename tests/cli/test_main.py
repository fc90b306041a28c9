"""The command itself: its version, its help and its subcommands."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import pillarattn
from pillarattn.cli.main import app


def test_the_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"pillarattn {pillarattn.__version__}"


COMMANDS = [
    "generate",
    "info",
    "probe",
    "evaluate",
    "sweep",
    "report",
    "bench plan",
    "bench kernels",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    words = command.split()
    assert words[0] in CliRunner().invoke(app, ["--help"]).output
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


def test_an_unknown_command_is_bad_input():
    assert CliRunner().invoke(app, ["fly"]).exit_code == 2
