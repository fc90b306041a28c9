"""Options that cannot be honoured are refused by name, before any forward pass."""

from __future__ import annotations

import pytest
from transformers import DynamicCache, StaticCache

import pillarattn
from pillarattn.patch.compat import cache_keyword

REFUSED = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "guidance_scale": {"guidance_scale": 2.0},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_cache": {"use_cache": False},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "constraints": {"constraints": [1]},
    "force_words_ids": {"force_words_ids": [[1]]},
    "synced_gpus": {"synced_gpus": True},
    "assistant_tokenizer": {"assistant_tokenizer": object()},
    "is_assistant": {"is_assistant": True},
    "max_new_token": {"max_new_token": 3},
}
CACHES = ("static", "offloaded", "offloaded_static", "quantized", "sliding_window", "paged")


@pytest.fixture
def refuse(pair, prompt, drafting, forwards):
    """Return `refuse(match, **kwargs)`: demand a ValueError with no forward pass before it."""

    def check(match, **kwargs):
        plain, patched = pair()
        with forwards(patched) as calls, pytest.raises(ValueError, match=match):
            patched.generate(
                prompt(1, 6), **{"max_new_tokens": 4, "assistant": drafting(), **kwargs}
            )
        assert calls == [0]
        # And the model is as good as before.
        wanted = plain.generate(prompt(1, 6), max_new_tokens=2, do_sample=False)
        got = patched.generate(
            prompt(1, 6), max_new_tokens=2, do_sample=False, assistant=drafting()
        )
        assert got.tolist() == wanted.tolist()

    return check


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_is_refused_by_name(refuse, name):
    refuse(name, **REFUSED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_option_in_a_generation_config(pair, refuse, name):
    if name in ("synced_gpus", "assistant_tokenizer", "max_new_token"):
        pytest.skip("an argument of generate alone")
    config = type(pair()[0].generation_config)(max_new_tokens=4, pad_token_id=0)
    for key, value in REFUSED[name].items():
        setattr(config, key, value)
    refuse(name, generation_config=config)


@pytest.mark.parametrize("name", CACHES)
def test_other_caches_are_refused_by_name(refuse, name):
    refuse(name, cache_implementation=name)


def test_cache_objects_are_refused_by_class(pair, refuse):
    model = pair()[0]
    keyword = cache_keyword()
    static = StaticCache(config=model.config, max_cache_len=10)
    refuse("StaticLayer|StaticCache", **{keyword: static})
    refuse("offload", **{keyword: DynamicCache(offloading=True)})


def test_two_assistants_are_refused(pair, refuse, drafting):
    refuse("assistant_model", assistant_model=pair()[0])
    refuse("custom_generate", custom_generate=lambda **_: None)


def test_classifier_free_guidance_as_a_processor_is_refused(pair, refuse):
    from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance

    refuse("Guidance", logits_processor=[Guidance(2.0, pair()[0])])


def test_a_greedy_rule_cannot_sample_nor_a_sampling_rule_be_greedy(refuse, drafting):
    refuse("do_sample=True", assistant=drafting(acceptance="greedy"), do_sample=True)
    for rule in ("gumbel", "rejection"):
        refuse("do_sample=False", assistant=drafting(acceptance=rule), do_sample=False)


def test_training_mode_is_refused(tiny_model, prompt, drafting, forwards):
    model = pillarattn.patch(tiny_model("llama"))
    model.train()
    model.gradient_checkpointing_enable()
    with forwards(model) as calls, pytest.raises(ValueError, match=r"model\.eval\(\)"):
        model.generate(prompt(1, 6), max_new_tokens=4, assistant=drafting())
    assert calls == [0]
    assert model.training
    # A backward pass works as if we were not there.
    model(input_ids=prompt(1, 6), labels=prompt(1, 6)).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_use_cache_false_in_the_models_config_is_refused_or_followed(tiny_model, prompt, drafting):
    model = pillarattn.patch(tiny_model("llama"))
    model.generation_config.use_cache = False
    with pytest.raises(ValueError, match="use_cache"):
        model.generate(prompt(1, 6), max_new_tokens=4, assistant=drafting())
    got = model.generate(
        prompt(1, 6), max_new_tokens=4, do_sample=False, use_cache=True, assistant=drafting()
    )
    model.generation_config.use_cache = True
    assert got.equal(model.generate(prompt(1, 6), max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("value", [3, "pillar", pillarattn.SelfSpeculativeGenerator, {}])
def test_something_else_as_assistant_is_a_type_error(pair, prompt, forwards, value):
    with forwards(pair()[1]) as calls, pytest.raises(TypeError, match="SelfSpeculativeGenerator"):
        pair()[1].generate(prompt(1, 6), max_new_tokens=4, assistant=value)
    assert calls == [0]


def test_a_model_as_assistant_is_pointed_to_assistant_model(pair, prompt):
    with pytest.raises(TypeError, match="assistant_model"):
        pair()[1].generate(prompt(1, 6), max_new_tokens=4, assistant=pair()[0])


def test_an_unpatched_model_says_to_patch_it(pair, prompt, drafting):
    plain = pair()[0]
    with pytest.raises(ValueError, match=r"pillarattn\.patch"):
        plain.generate(prompt(1, 6), max_new_tokens=4, custom_generate=drafting())
    with pytest.raises(ValueError, match="assistant"):
        plain.generate(prompt(1, 6), max_new_tokens=4, assistant=drafting())


@pytest.mark.parametrize("harmless", [
    {"num_beams": 1}, {"guidance_scale": 1.0}, {"output_attentions": False}, {"use_cache": True},
    {"num_assistant_tokens": 5}, {"length_penalty": 2.0}, {"disable_compile": True},
    {"assistant_model": None}, {"custom_generate": None}, {"streamer": None}, {"assistant": None},
    {"cache_implementation": "dynamic"}, {"penalty_alpha": 0.0},
])  # fmt: skip
def test_harmless_values_change_nothing(pair, prompt, drafting, harmless):
    plain, patched = pair()
    kwargs = {"max_new_tokens": 6, "do_sample": False}
    got = patched.generate(prompt(1, 6), **kwargs, **{"assistant": drafting(), **harmless})
    assert got.tolist() == plain.generate(prompt(1, 6), **kwargs).tolist()
