"""`patch` changes one model and nothing else; `unpatch` puts back what was there."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import pillarattn
from pillarattn.patch.compat import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
from pillarattn.patch.patching import is_patched

NEW = {"max_new_tokens": 10, "do_sample": False}


def photograph(model):
    """Return what must not change: names, values and identities."""
    return {
        "type": type(model),
        "attributes": sorted(vars(model)),
        "config": model.config.to_dict(),
        "config ids": [id(m.config) for m in model.modules() if hasattr(m, "config")],
        "attention": model.config._attn_implementation,
        "generation config": (id(model.generation_config), model.generation_config.to_dict()),
        "modules": [(name, type(m), id(m)) for name, m in model.named_modules()],
        "forward": model.forward.__func__,
        "generate": model.generate.__func__,
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    }


def test_unpatching_restores_everything(tiny_model, family, prompt, drafting):
    model = tiny_model(family)
    before = photograph(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    plain = model.generate(prompt(1, 8), **NEW)
    assert pillarattn.patch(model) is model
    model.generate(prompt(1, 8), **NEW, assistant=drafting())
    assert pillarattn.unpatch(model) is model
    assert photograph(model) == before
    assert {name: v.data_ptr() for name, v in model.state_dict().items()} == pointers
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    assert model.generate(prompt(1, 8), **NEW).equal(plain)
    with pytest.raises(ValueError, match="assistant"):
        model.generate(prompt(1, 8), **NEW, assistant=drafting())


def test_other_entries_of_the_registries_stay(tiny_model, prompt, drafting):
    def entries():
        return {
            name: registry[name]
            for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
            for name in registry.valid_keys()
            if not name.startswith("pillarattn")
        }

    before = entries()
    model = pillarattn.patch(tiny_model("llama"))
    model.generate(prompt(1, 8), **NEW, assistant=drafting())
    pillarattn.unpatch(model)
    assert entries() == before


def test_patching_twice_changes_nothing_more(tiny_model, prompt, drafting):
    model = tiny_model("llama")
    before = photograph(model)
    pillarattn.patch(model)
    once = vars(model).copy(), model.config
    pillarattn.patch(model)
    assert (vars(model), model.config) == once
    pillarattn.unpatch(model)
    pillarattn.unpatch(model)
    assert photograph(model) == before
    pillarattn.patch(model)
    wanted = model.generate(prompt(1, 8), **NEW)
    assert model.generate(prompt(1, 8), **NEW, assistant=drafting()).equal(wanted)


def test_unpatching_a_model_that_never_was_is_harmless(tiny_model):
    model = tiny_model("llama")
    before = photograph(model)
    pillarattn.unpatch(model)
    assert photograph(model) == before


def test_models_built_from_one_config_object_are_apart(pair, prompt, drafting):
    config = LlamaConfig(**{**pair()[0].config.to_dict(), "dtype": None})
    first, second = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    assert first.config is second.config
    before = photograph(second)
    pillarattn.patch(first)
    inside = []
    handle = first.register_forward_pre_hook(
        lambda *_: inside.append(second.config._attn_implementation)
    )
    first.generate(prompt(1, 8), **NEW, assistant=drafting())
    handle.remove()
    assert set(inside) == {before["attention"]}
    assert photograph(second) == before
    assert not is_patched(second)
    pillarattn.unpatch(first)
    assert first.config is second.config


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "qwen3_moe"])
def test_without_an_assistant_outputs_are_the_same_bits(pair, ragged, family, attention):
    if (family, attention) == ("gemma2", "sdpa"):
        pytest.skip("the tiny gemma2 is eager: only there its soft cap is applied")
    plain, patched = pair(family, attn_implementation=attention)
    a, b = plain(**ragged), patched(**ragged)
    assert torch.equal(a.logits, b.logits)
    options = {**ragged, **NEW, "return_dict_in_generate": True, "output_logits": True}
    a, b = plain.generate(**options), patched.generate(**options)
    assert a.sequences.equal(b.sequences)
    assert all(x.equal(y) for x, y in zip(a.logits, b.logits, strict=True))
    if attention == "eager":
        a = plain(**ragged, output_attentions=True).attentions
        b = patched(**ragged, output_attentions=True).attentions
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_sampling_without_an_assistant_is_the_same(pair, prompt):
    outputs = []
    for model in pair():
        torch.manual_seed(3)
        outputs.append(model.generate(prompt(2, 8), max_new_tokens=10, do_sample=True).tolist())
    assert outputs[0] == outputs[1]


def test_attention_chosen_after_patching_is_followed(tiny_model, ragged, drafting):
    plain, model = tiny_model("llama"), pillarattn.patch(tiny_model("llama"))
    for attention in ("eager", "sdpa", "eager"):
        plain.set_attn_implementation(attention)
        model.set_attn_implementation(attention)
        seen = set()
        handle = model.register_forward_pre_hook(
            lambda m, _, seen=seen: seen.add(m.config._attn_implementation)
        )
        wanted = plain.generate(**ragged, **NEW)
        assert model.generate(**ragged, **NEW, assistant=drafting()).equal(wanted)
        handle.remove()
        assert all(name.endswith(attention) for name in seen)
        assert model.config._attn_implementation == attention
        assert model(**ragged).logits.equal(plain(**ragged).logits)


def test_a_generate_of_the_instance_is_kept(tiny_model, prompt, drafting):
    model = tiny_model("llama")
    calls = []

    def theirs(*args, **kwargs):
        calls.append(sorted(kwargs))
        return type(model).generate(model, *args, **kwargs)

    model.generate = theirs
    pillarattn.patch(model)
    model.generate(prompt(1, 8), **NEW, assistant=drafting())
    assert len(calls) == 1
    pillarattn.unpatch(model)
    assert model.generate is theirs


def test_weights_changed_while_patched_stay_changed(tiny_model, prompt):
    model = pillarattn.patch(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    wanted = model(prompt(1, 4)).logits
    assert pillarattn.unpatch(model)(prompt(1, 4)).logits.equal(wanted)


def test_a_resized_vocabulary_survives_unpatching(tiny_model, prompt, drafting):
    model = pillarattn.patch(tiny_model("llama"))
    model.resize_token_embeddings(101)
    wanted = model.generate(prompt(1, 8), **NEW)
    assert model.generate(prompt(1, 8), **NEW, assistant=drafting()).equal(wanted)
    pillarattn.unpatch(model)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 101


@pytest.mark.parametrize("kernels", ["fast", None, 3])
def test_unknown_kernels_are_refused(tiny_model, kernels):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="kernels must be one of"):
        pillarattn.patch(model, kernels=kernels)
    assert not is_patched(model)


def test_the_context_of_a_copy_is_its_own(tiny_model, prompt, drafting):
    model = pillarattn.patch(tiny_model("llama"))
    twin = copy.deepcopy(model)
    assert is_patched(twin) and twin.config is not model.config
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    wanted = model.generate(prompt(1, 8), **NEW)
    other = twin.generate(prompt(1, 8), **NEW)
    assert other.tolist() != wanted.tolist()
    assert twin.generate(prompt(1, 8), **NEW, assistant=drafting()).equal(other)
    pillarattn.unpatch(model)
    assert twin.generate(prompt(1, 8), **NEW, assistant=drafting()).equal(other)
    pillarattn.unpatch(twin)
    assert not is_patched(twin) and "generate" not in vars(twin)


def test_auto_model_from_config_and_back(tmp_path, tiny_model, prompt):
    """A saved patched model is a saved model: no foreign key, no trace."""
    plain, model = tiny_model("llama"), pillarattn.patch(tiny_model("llama"))
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "patched")
    for name in ("config.json", "generation_config.json"):
        text = (tmp_path / "patched" / name).read_text()
        assert text == (tmp_path / "plain" / name).read_text()
        assert "pillar" not in text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert not is_patched(loaded)
    assert loaded(prompt(1, 8)).logits.equal(plain(prompt(1, 8)).logits)


def test_unpatching_frees_what_generators_keep_of_the_model(
    rehearsed, tiny_model, prompt, drafting
):
    model, other = (pillarattn.patch(tiny_model("llama")) for _ in range(2))
    pillars, ids = [drafting() for _ in range(3)], prompt(1, 12)
    for pillar in pillars:
        model.generate(ids, **NEW, assistant=pillar)
    other.generate(ids, **NEW, assistant=pillars[2])
    before = [weakref.ref(passes.cache) for passes in rehearsed]
    passes = [weakref.ref(passes) for passes in rehearsed]
    rehearsed.clear()
    gc.collect()
    assert [one() is not None for one in before] == [True, True, False, True]
    pillarattn.unpatch(model)
    gc.collect()
    assert [one() is not None for one in before] == [False, False, False, True]
    assert [one() is not None for one in passes] == [False, False, False, True]
