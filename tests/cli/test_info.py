"""`pillarattn info`: the machine, and one row about a model."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from pillarattn.cli.main import app


def info(*arguments):
    return CliRunner().invoke(app, ["info", *map(str, arguments)])


def test_the_machine_is_described():
    result = info()
    assert result.exit_code == 0
    for words in ("transformers", torch.__version__, "streaming", "value_aware", "reference"):
        assert words in result.output
    assert "\x1b" not in result.output


@pytest.mark.parametrize(("name", "verdict"), [("llama", "lossless"), ("mamba", "refused")])
def test_a_model_type_is_judged_without_weights(name, verdict):
    result = info(name, "--json", "-")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["model"]
    assert (row["name"], row["verdict"]) == (name, verdict)
    assert (row["reason"] is None) == (verdict == "lossless")


def test_a_folder_is_judged(tiny_checkpoint):
    result = info(tiny_checkpoint)
    assert result.exit_code == 0, result.output
    assert "lossless" in result.output
    assert "kv_heads" in result.output


def test_an_unknown_model_is_bad_input():
    result = info("no/such/folder/here")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
