"""Parameter counts: by rule and by counting, against `sum(p.numel())` of real structures."""

from __future__ import annotations

import pytest
import torch

from pillarattn.theory.config_fields import ConfigFields
from pillarattn.theory.layer_shapes import layer_shapes
from pillarattn.theory.weight_counts import bytes_of_model, weights_of_config, weights_of_model

# Default configs of families with different blocks: latents, experts, shared experts, gates,
# two-matrix MLPs, recurrent layers, per-layer settings, a multimodal wrapper.
FULL_SIZE = [
    *("llama", "qwen2", "qwen3", "gemma2", "phi", "gpt_neox", "starcoder2", "bamba", "qwen3_next"),
    *("deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "llama4_text"),
    *("ernie4_5_moe", "jamba", "kimi_linear", "minimax", "lfm2", "olmo_hybrid"),
]


def by_rule(config):
    fields = ConfigFields(config)
    return weights_of_config(fields, layer_shapes(fields)[0])


def structure(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_matrices_of_tiny_models_are_counted_exactly(tiny_model, family):
    model = tiny_model(family)
    weights = by_rule(model.config)
    # Norms and biases are vectors, and the position table of GPT-2 is no matrix product.
    tables = {"transformer.wpe.weight"}
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() > 1 and name not in tables
    )
    assert weights.total == matrices


def test_everything_is_counted_in_a_model(tiny_model, family):
    model = tiny_model(family)
    counted = weights_of_model(model, by_rule(model.config))
    assert counted.total == sum(p.numel() for p in model.parameters())
    assert counted.head == model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize("model_type", FULL_SIZE)
def test_rules_miss_by_less_than_a_thousandth_at_full_size(model_type):
    model = structure(model_type)
    rule = by_rule(model.config)
    counted = weights_of_model(model, rule)
    total = sum(p.numel() for p in model.parameters())
    assert counted.total == total
    assert rule.total == pytest.approx(total, rel=1e-3)
    for rows in (1, 8, 200):
        assert rule.streamed(rows, rows) == pytest.approx(counted.streamed(rows, rows), rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_table_is_the_head_and_an_untied_one_is_idle(tiny_model, tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    for weights in (by_rule(model.config), weights_of_model(model, by_rule(model.config))):
        assert weights.head == 97 * 64
        assert weights.idle == (0 if tied else 97 * 64)


def test_experts_are_told_from_what_every_token_uses(tiny_model):
    model = tiny_model("qwen3_moe")
    weights = weights_of_model(model, by_rule(model.config))
    assert (weights.moe_layers, weights.experts, weights.active) == (2, 4, 2)
    assert weights.expert == 3 * 64 * 64


def test_towers_of_other_modalities_are_idle(tiny_model):
    text = tiny_model("llama")

    class WithTower(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.language = text
            self.vision_tower = torch.nn.Linear(30, 10)

        def get_output_embeddings(self):
            return text.get_output_embeddings()

    plain = weights_of_model(text, by_rule(text.config))
    tower = weights_of_model(WithTower(), by_rule(text.config))
    assert tower.idle == plain.idle + 310
    assert (tower.dense, tower.head) == (plain.dense, plain.head)


def test_bytes_of_a_parameter_are_a_mean(tiny_model):
    assert bytes_of_model(tiny_model("llama")) == 4.0
    assert bytes_of_model(tiny_model("llama").to(torch.bfloat16)) == 2.0
    mixed = torch.nn.ModuleList([torch.nn.Linear(3, 3, bias=False) for _ in range(2)])
    mixed[0].to(torch.float16)
    assert bytes_of_model(mixed) == 3.0
