"""Reading configs: names of many families, text parts, dtypes, quantisation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pillarattn.theory.config_fields import ConfigFields

PLAIN = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("wrap", [dict, lambda values: SimpleNamespace(**values)])
def test_dicts_and_objects_are_read_alike(wrap):
    fields = ConfigFields(wrap(PLAIN))
    assert (fields.model_type, fields.need("hidden"), fields.need("layers")) == ("llama", 64, 2)
    assert fields.get("window") is None
    assert fields.get_int("experts", 5) == 5


def test_older_names_are_understood():
    fields = ConfigFields({"n_embd": 32, "n_layer": 3, "n_head": 4})
    assert [fields.need(name) for name in ("hidden", "layers", "heads")] == [32, 3, 4]


@pytest.mark.parametrize("part", ["text_config", "llm_config"])
def test_the_text_part_of_a_multimodal_config_is_read(part):
    fields = ConfigFields({"model_type": "vlm", "hidden_size": 7, part: PLAIN, "dtype": "float32"})
    assert (fields.model_type, fields.need("hidden"), fields.dtype_bytes) == ("llama", 64, 4)


def test_a_config_object_chooses_its_own_text_part():
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3")
    fields = ConfigFields(config)
    assert fields.model_type == "gemma3_text"
    assert fields.need("hidden") == config.text_config.hidden_size


def test_a_missing_field_is_named_with_its_names():
    with pytest.raises(
        ValueError, match=r"'llama'.*positive integer as one of vocab_size, got None"
    ):
        ConfigFields(PLAIN).need("vocab")
    with pytest.raises(ValueError, match="got -3"):
        ConfigFields({**PLAIN, "vocab_size": -3}).need("vocab")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2.0),
        ({"torch_dtype": "float32"}, 4.0),
        ({"dtype": "torch.bfloat16"}, 2.0),
        ({"dtype": "float8_e4m3fn"}, 1.0),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, 0.5),
        ({"quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16"}, 1.0),
        ({"quantization_config": {"quant_method": "mxfp4"}}, 0.5),
        ({"quantization_config": {"load_in_8bit": True}}, 1.0),
        ({"quantization_config": {"quant_method": "unheard"}, "dtype": "float16"}, 2.0),
    ],
)
def test_bytes_of_a_parameter(settings, expected):
    assert ConfigFields({**PLAIN, **settings}).weight_bytes == expected


def test_a_torch_dtype_is_understood():
    import torch

    assert ConfigFields({**PLAIN, "dtype": torch.float32}).dtype_bytes == 4


def test_embeddings_are_tied_unless_a_config_says_otherwise():
    assert ConfigFields(PLAIN).tied
    assert not ConfigFields({**PLAIN, "tie_word_embeddings": False}).tied
    assert not ConfigFields({"text_config": PLAIN, "tie_word_embeddings": False}).tied


def test_layers_may_have_settings_of_their_own():
    fields = ConfigFields({**PLAIN, "head_dim": 8, "per_layer_config": {"1": {"head_dim": 16}}})
    assert [fields.layer(i).need("head_dim") for i in (0, 1)] == [8, 16]
    assert ConfigFields(PLAIN).layer(1).need("hidden") == 64
