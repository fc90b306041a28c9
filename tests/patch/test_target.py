"""Positions: blocks of rows at different lengths stay inside what the model can place."""

from __future__ import annotations

import copy

import pytest
import torch

import pillarattn
from pillarattn.errors import UnsupportedOptionError

ROPE = {"rope_theta": 10000.0}
STABLE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# Frequencies that depend on how long the text is by now: a block that crosses the boundary places
# its tokens otherwise than single steps do.
MOVING = {
    "dynamic": ("llama", 32, {"rope_type": "dynamic", "factor": 2.0}),
    "longrope": ("llama", 128, LONGROPE),
    "phi3 longrope": ("phi3", 128, LONGROPE),
}


@pytest.mark.parametrize("name", STABLE)
def test_rotary_scalings_that_do_not_look_at_the_length(pair, prompt, same, drafting, name):
    models = pair(max_position_embeddings=128, rope_parameters={**ROPE, **STABLE[name]})
    same(*models, drafting(k=7, s=0.8), input_ids=prompt(2, 24), max_new_tokens=16)


@pytest.mark.parametrize("name", MOVING)
def test_moving_rotary_scalings_are_exact_or_refused(tiny_model, prompt, drafting, name):
    family, positions, rope = MOVING[name]
    overrides = {"max_position_embeddings": positions, "rope_parameters": {**ROPE, **rope}}
    if family == "phi3":
        overrides["original_max_position_embeddings"] = 32
    plain = tiny_model(family, **overrides)
    patched = pillarattn.patch(copy.deepcopy(plain))

    def outputs(tokens, new, s):
        kwargs = {"input_ids": prompt(1, tokens), "max_new_tokens": new, "do_sample": False}
        wanted = copy.deepcopy(plain).generate(**kwargs)
        got = copy.deepcopy(patched).generate(**kwargs, assistant=drafting(k=7, s=s))
        return got.tolist(), wanted.tolist()

    for tokens in (20, 31):
        with pytest.raises(UnsupportedOptionError, match=r"rope_type=.*max_new_tokens"):
            outputs(tokens, 24, 1.0)
    for s in (0.8, 1.0):
        got, wanted = outputs(8, 24, s)
        assert got == wanted
        if name != "dynamic":
            got, wanted = outputs(40, 24, s)
            assert got == wanted


def test_a_window_that_only_the_cache_knows_is_kept_or_refused(tiny_model, prompt, drafting):
    """DynamicCache reads `sliding_window` off any config, also where the model ignores it."""
    plain = tiny_model("llama", sliding_window=16)
    try:
        patched = pillarattn.patch(copy.deepcopy(plain))
    except pillarattn.UnsupportedModelError:
        return
    kwargs = {"input_ids": prompt(1, 24), "max_new_tokens": 16, "do_sample": False}
    wanted = plain.generate(**kwargs)
    assert patched.generate(**kwargs, assistant=drafting()).tolist() == wanted.tolist()


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("s", [0.8, 1.0])
def test_a_text_that_fills_the_position_table(pair, prompt, same, drafting, rows, s):
    """Rows ahead of others must not draft past the last position."""
    pillar = drafting(k=7, s=s)
    same(
        *pair("gpt2", n_positions=32), pillar, input_ids=prompt(rows, 12), max_new_tokens=20
    )  # fmt: skip
    assert pillar.stats.accepted > 0


def test_rows_that_ended_at_the_last_position(pair, prompt, same, drafting):
    models = pair("gpt2", n_positions=32)
    free = models[0].generate(prompt(3, 12), max_new_tokens=20, do_sample=False)
    same(
        *models, drafting(k=7, s=0.8), input_ids=prompt(3, 12), max_new_tokens=20,
        eos_token_id=[int(free[0, 20]), int(free[1, 28])],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("mistral", {"sliding_window": 4}),
        ("mistral", {"sliding_window": None}),
        ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4, "attention_bias": True}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64}),
        ("gemma2", {"attn_logit_softcapping": None}),
    ],
)
@pytest.mark.parametrize("s", [0.5, 1.0])
def test_variants_of_a_family(pair, ragged, same, drafting, family, overrides, s):
    pillar = drafting(s=s)
    same(*pair(family, **overrides), pillar, **ragged, max_new_tokens=10)
    if s == 1.0:
        assert pillar.stats.acceptance_rate > 0.9, "the draft saw other attention than the target"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_either_attention_implementation(pair, ragged, same, drafting, attention):
    for family in ("llama", "mistral", "gpt2"):
        same(*pair(family, attn_implementation=attention), drafting(), **ragged, max_new_tokens=12)


def test_half_precision_follows_plain_decoding_closely(tiny_model, prompt, drafting):
    """Near-ties may flip in bf16; logits of the same prefix agree."""
    plain = tiny_model("llama").to(torch.bfloat16)
    patched = pillarattn.patch(copy.deepcopy(plain))
    out = patched.generate(
        prompt(1, 12), max_new_tokens=12, do_sample=False, assistant=drafting(),
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = plain(out.sequences).logits[:, 11:-1].float()
    mine = torch.stack(out.logits, dim=1)
    assert float((logits - mine).abs().max() / logits.std()) < 0.1
