"""Known models: found by their names, and by nobody else's."""

from __future__ import annotations

import pytest

from pillarattn.theory.known_models import KNOWN_MODELS, known_model


@pytest.mark.parametrize(
    ("name", "proper"),
    [
        ("smollm2", "SmolLM2-135M"),
        ("SmolLM2-135M", "SmolLM2-135M"),
        ("qwen3-8b", "Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
    ],
)
def test_names(name, proper):
    assert known_model(name) == (proper, KNOWN_MODELS[proper])


@pytest.mark.parametrize("name", ["qwen3", "somebody/Qwen3-8B", "Qwen3-8B-Base", "./Qwen3-8B", ""])
def test_other_names_are_not_known(name):
    assert known_model(name) is None


def test_a_caller_gets_a_copy():
    known_model("smollm2")[1]["vocab_size"] = 1
    assert KNOWN_MODELS["SmolLM2-135M"]["vocab_size"] == 49152


@pytest.mark.parametrize("name", list(KNOWN_MODELS))
def test_the_fields_are_those_of_the_familys_config(name):
    """The class of the family accepts every field under that name."""
    from transformers import AutoConfig

    values = dict(KNOWN_MODELS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert all(getattr(config, field) == value for field, value in values.items())
