"""Rounded weights: drafts alone see them, the output does not, and nothing of them stays behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pillarattn
from pillarattn import PillarCache
from pillarattn.datatypes import Phase
from pillarattn.errors import UnsupportedOptionError
from pillarattn.modules.step import StepState
from pillarattn.patch.current_pass import current_cache
from pillarattn.patch.draft_weights import PRODUCTS, DraftWeights

KINDS = tuple(PRODUCTS)


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def rounded(weights):
    return {"name": "sparse", "weights": weights}


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_output_is_the_models_own(pair, ragged, same, drafting, family, weights):
    plain, patched = pair(family)
    assistant = drafting(drafter=rounded(weights))
    same(plain, patched, assistant, **ragged, max_new_tokens=24)
    assert assistant.stats.drafted > 0
    assert not any("forward" in linear.__dict__ for linear in linears(patched))


@pytest.mark.parametrize("weights", KINDS)
def test_sampled_tokens_are_those_of_the_same_noise_without_drafts(pair, prompt, drafting, weights):
    _, patched = pair()
    kwargs = {"input_ids": prompt(3, 24), "max_new_tokens": 16, "do_sample": True}
    wanted = patched.generate(**kwargs, assistant=drafting(k=0, seed=3))
    got = patched.generate(**kwargs, assistant=drafting(seed=3, drafter=rounded(weights)))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_draft_passes_of_one_cache_are_rounded_and_nothing_else(pair, weights, bias):
    model = copy.deepcopy(pair("llama", attention_bias=bias, mlp_bias=bias)[0])
    for linear in linears(model):
        if linear.bias is not None:
            nn.init.normal_(linear.bias)
    states = [torch.randn(2, 3, linear.in_features) for linear in linears(model)]
    own = [linear(x) for linear, x in zip(linears(model), states, strict=True)]
    mine, other = PillarCache(), PillarCache()
    rounding = DraftWeights(model, weights, mine)

    def now(cache, phase):
        cache.step = StepState(phase)
        with current_cache(cache), torch.no_grad():
            return [linear(x) for linear, x in zip(linears(model), states, strict=True)]

    for found, wanted in zip(now(mine, Phase.DRAFT), own, strict=True):
        error = (found - wanted).norm() / wanted.norm()
        assert 1e-5 < error < 0.03 and found.dtype == torch.float32
    outside = [linear(x) for linear, x in zip(linears(model), states, strict=True)]
    for same in (
        now(mine, Phase.VERIFY),
        now(mine, Phase.PREFILL),
        now(other, Phase.DRAFT),
        outside,
    ):
        assert all(torch.equal(a, b) for a, b in zip(same, own, strict=True))
    rounding.close()
    assert all(torch.equal(a, b) for a, b in zip(now(mine, Phase.DRAFT), own, strict=True))


def test_two_runs_may_round_one_model_each_for_itself(pair):
    model = copy.deepcopy(pair("llama")[0])
    layer = linears(model)[0]
    states = torch.randn(2, layer.in_features)
    caches = [PillarCache(), PillarCache()]
    own = layer(states)
    first, second = (
        DraftWeights(model, kind, cache)
        for kind, cache in zip(("bfloat16", "int8"), caches, strict=True)
    )

    def drafted(cache):
        cache.step = StepState(Phase.DRAFT)
        with current_cache(cache), torch.no_grad():
            return layer(states)

    assert torch.equal(layer(input=states), own)
    in_bf16, in_int8 = (drafted(cache) for cache in caches)
    assert not torch.equal(in_bf16, in_int8) and not torch.equal(in_bf16, own)
    first.close()
    assert torch.equal(drafted(caches[0]), own) and torch.equal(drafted(caches[1]), in_int8)
    second.close()
    assert torch.equal(drafted(caches[1]), own) and "forward" not in layer.__dict__


def test_layers_that_are_more_than_a_product_keep_their_own(pair):
    model = copy.deepcopy(pair()[0])
    first, second = linears(model)[:2]
    first.forward = wrapper = lambda x: nn.Linear.forward(first, x) + 1
    second.weight = nn.Parameter(second.weight.detach().to(torch.bfloat16))
    rounding = DraftWeights(model, "int8", PillarCache())
    assert first.forward is wrapper and "forward" not in second.__dict__
    rounding.close()
    assert first.forward is wrapper


def test_a_run_that_fails_leaves_the_model_as_it_was(pair, prompt, drafting):
    _, patched = pair()

    def fail(row, ids):
        if len(ids) > 12:
            raise RuntimeError("broken")
        return list(range(97))

    with pytest.raises(RuntimeError, match="broken"):
        patched.generate(
            input_ids=prompt(1, 8), max_new_tokens=12, prefix_allowed_tokens_fn=fail,
            assistant=drafting(drafter=rounded("int8")),
        )  # fmt: skip
    assert not any("forward" in linear.__dict__ for linear in linears(patched))


def test_a_lack_of_memory_leaves_no_layer_rounded(pair, monkeypatch):
    model = copy.deepcopy(pair()[0])
    product, rounded_layers = PRODUCTS["int8"], []

    def scarce(linear):
        if len(rounded_layers) == 3:
            raise MemoryError("no room")
        rounded_layers.append(linear)
        return product(linear)

    monkeypatch.setitem(PRODUCTS, "int8", scarce)
    with pytest.raises(MemoryError, match="no room"):
        DraftWeights(model, "int8", PillarCache())
    assert not any("forward" in linear.__dict__ for linear in linears(model))


def test_what_cannot_be_rounded_is_refused_before_the_prompt(tiny_model, prompt, drafting):
    model = pillarattn.patch(tiny_model("llama").to(torch.bfloat16))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(UnsupportedOptionError, match=r"fp32 linear layers on a CPU.*bfloat16"):
        model.generate(
            input_ids=prompt(1, 8), max_new_tokens=4, assistant=drafting(drafter=rounded("int8"))
        )
    assert not calls
