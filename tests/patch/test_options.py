"""Calls that cannot be honoured are refused by name, before any forward pass.

The options of `generate` one by one: `test_generation_fields.py`.
"""

from __future__ import annotations

import pytest
from transformers import DynamicCache, EncoderDecoderCache

import pillarattn
from pillarattn.patch.compat import cache_keyword

CACHES = ("offloaded", "offloaded_static", "quantized", "sliding_window", "paged")


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


@pytest.mark.parametrize("name", CACHES)
def test_other_caches_are_refused_by_name(refuse, name):
    refuse(name, cache_implementation=name)


def test_cache_objects_are_refused_by_class(pair, refuse):
    keyword = cache_keyword()
    refuse("offload", **{keyword: DynamicCache(offloading=True)})
    refuse("EncoderDecoderCache", **{keyword: EncoderDecoderCache(DynamicCache(), DynamicCache())})


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
    {"assistant": None}, {"streamer": None}, {"cache_implementation": "dynamic"},
    {"guidance_scale": 1}, {"num_beams": True},
])  # fmt: skip
def test_harmless_values_change_nothing(pair, prompt, drafting, harmless):
    plain, patched = pair()
    kwargs = {"max_new_tokens": 6, "do_sample": False}
    got = patched.generate(prompt(1, 6), **kwargs, **{"assistant": drafting(), **harmless})
    assert got.tolist() == plain.generate(prompt(1, 6), **kwargs).tolist()
