"""Models that cannot be decoded losslessly are refused at `patch`, each with its reason."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

import pillarattn
from pillarattn.patch.patching import is_patched
from pillarattn.patch.support import describe

SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def build(name):
    """Return a tiny model of a family that has no lossless drafts."""
    if name == "bloom":
        config = AutoConfig.for_model(
            "bloom", vocab_size=97, hidden_size=64, n_layer=2, n_head=4, pad_token_id=0
        )
    elif name == "mamba":
        config = AutoConfig.for_model(
            "mamba", vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=8,
            pad_token_id=0,
        )  # fmt: skip
    elif name == "falcon alibi":
        config = AutoConfig.for_model(
            "falcon", vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            alibi=True, new_decoder_architecture=False,
        )  # fmt: skip
    elif name == "t5":
        config = AutoConfig.for_model(
            "t5", vocab_size=97, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )  # fmt: skip
        return AutoModelForSeq2SeqLM.from_config(config).eval()
    elif name == "llama4 chunked":
        config = AutoConfig.for_model(
            "llama4_text", **SHAPE, head_dim=16, intermediate_size_mlp=128, num_local_experts=2,
            attention_chunk_size=8, interleave_moe_layer_step=1, num_experts_per_tok=1,
        )  # fmt: skip
    elif name == "qwen3_next":
        config = AutoConfig.for_model(
            "qwen3_next", **SHAPE, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, num_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
    else:
        raise AssertionError(name)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("name", "reason"), [("mamba", "single steps by"), ("t5", "encoder")])
def test_families_that_cannot_be_verified_are_refused(name, reason):
    with torch.random.fork_rng():
        model = build(name)
    before = sorted(vars(model))
    with pytest.raises(pillarattn.UnsupportedModelError, match=reason) as refusal:
        pillarattn.patch(model)
    message = str(refusal.value)
    assert type(model).__name__ in message
    assert "\n" not in message and len(message) < 400
    assert sorted(vars(model)) == before
    assert "without assistant=" in message or describe(model)["verdict"] == "refused"


@pytest.mark.parametrize("name", ["bloom", "falcon alibi"])
def test_families_whose_attention_is_out_of_reach_get_other_drafts(name, prompt, same, drafting):
    with torch.random.fork_rng():
        model = build(name)
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="AttentionInterface.*prompt lookup"):
        pillarattn.patch(model)
    row = model.pillarattn_record.info
    assert row["verdict"] == "lossless-dense-draft"
    assert "AttentionInterface" in row["reason"]
    assert describe(model)["verdict"] == "lossless-dense-draft"
    same(plain, model, drafting(), input_ids=prompt(2, 9), max_new_tokens=8)


@pytest.mark.parametrize("name", ["llama4 chunked", "qwen3_next"])
def test_chunks_and_recurrent_layers_are_sparse_where_they_can_be(name, prompt, same, drafting):
    with torch.random.fork_rng():
        model = build(name)
    plain = copy.deepcopy(model)
    pillarattn.patch(model)
    assert model.pillarattn_record.info["verdict"] == "lossless"
    same(plain, model, drafting(), input_ids=prompt(2, 24), max_new_tokens=8)


def test_what_is_no_causal_model_is_refused(pair):
    config = pair()[0].config
    for model in (
        AutoModel.from_config(config),
        AutoModelForSequenceClassification.from_config(config),
    ):
        with pytest.raises(pillarattn.UnsupportedModelError, match="AutoModelForCausalLM"):
            pillarattn.patch(model)
    for thing in (torch.nn.Linear(2, 2), "gpt2", None):
        with pytest.raises(pillarattn.UnsupportedModelError, match="PreTrainedModel"):
            pillarattn.patch(thing)


def test_other_attention_implementations_are_refused(tiny_model):
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(pillarattn.UnsupportedModelError, match=r"flex_attention.*'sdpa', 'eager'"):
        pillarattn.patch(model)


def test_upcast_attention_keeps_to_itself(tiny_model, prompt, same, drafting):
    model = tiny_model("gpt2", reorder_and_upcast_attn=True)
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="reorder_and_upcast_attn"):
        pillarattn.patch(model)
    same(plain, model, drafting(), input_ids=prompt(2, 9), max_new_tokens=8)


def test_refused_models_stay_usable(prompt):
    with torch.random.fork_rng():
        model = build("mamba")
    wanted = model.generate(prompt(1, 6), max_new_tokens=4, do_sample=False)
    with pytest.raises(pillarattn.UnsupportedModelError):
        pillarattn.patch(model)
    assert not is_patched(model)
    assert model.generate(prompt(1, 6), max_new_tokens=4, do_sample=False).equal(wanted)


def test_a_description_of_every_family(pair, family):
    row = describe(pair(family)[1])
    assert row["verdict"] == "lossless" and row["reason"] is None
    assert (row["layers"], row["heads"]) == ({"gemma2": 4}.get(family, 2), 4)
    assert row["head_dim"] == 16
    assert row["kv_heads"] == (4 if family in ("gpt2", "gpt_neox") else 2)
    assert row["window"] == (16 if family in ("mistral", "gemma2") else None)
    assert row["attention"] == ("eager" if family == "gemma2" else "sdpa")
    assert row["sparse_layers"] == 2
    assert describe(pair(family)[0]) == row
