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


def row_of(*arguments):
    result = info(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["model"]


def test_recurrent_layers_are_no_sparse_layers(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("bamba", attn_layer_indices=[9, 18, 27]).save_pretrained(tmp_path)
    row = row_of(tmp_path)
    assert (row["verdict"], row["layers"], row["sparse_layers"]) == ("lossless", 32, 3)
    assert row_of("zamba2")["sparse_layers"] == 9
    assert row_of("mamba")["sparse_layers"] == 0


def test_what_a_config_rules_out_stays_ruled_out():
    # The suite's tiny bamba has attention layers; the type's default config has none.
    row = row_of("bamba")
    assert (row["verdict"], row["sparse_layers"]) == ("lossless-dense-draft", 0)
    assert row["reason"] == "no layer has attention over keys"


@pytest.mark.parametrize("name", ["t5", "clip"])
def test_a_type_without_a_causal_model_is_refused(name):
    row = row_of(name)
    assert row["verdict"] == "refused"
    assert row["reason"] == f"transformers has no causal language model of type {name!r}"


def test_the_language_model_of_a_multimodal_type_counts():
    row = row_of("qwen2_vl")
    assert (row["verdict"], row["sparse_layers"]) == ("lossless", row["layers"])


@pytest.mark.parametrize("error", [RuntimeError("no\nway"), KeyError("rope"), ValueError("odd")])
def test_a_config_that_cannot_be_built_is_no_crash(monkeypatch, error):
    from transformers import AutoModelForCausalLM

    def fails(config):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", fails)
    row = row_of("llama")
    assert row["verdict"] == "lossless" and row["tested"].startswith("tiny random model")
    assert row["remarks"].startswith(f"it cannot be built from this config: {type(error).__name__}")
    monkeypatch.setattr("pillarattn.cli.info.look_up", lambda name: None)
    row = row_of("llama")
    assert row["verdict"] == "unknown" and "cannot be built" in row["reason"]
    assert "unknown" in info("llama").output


def test_a_config_that_its_own_family_refuses_is_bad_input(monkeypatch):
    def refuses(name):
        raise TypeError("hidden_size must be 0,\n got 256")

    monkeypatch.setattr("pillarattn.cli.info.load_config", refuses)
    result = info("odd")
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: the config of 'odd' is not valid: hidden_size must be 0, got 256\n"
    )
