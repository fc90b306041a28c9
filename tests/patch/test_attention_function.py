"""The attention twin and its mask twin: who computes what, and what is refused."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import DynamicCache

import pillarattn
from pillarattn.datatypes import Phase
from pillarattn.modules.step import StepState
from pillarattn.patch.attention_function import (
    PREFIX,
    REFUSED_ARGUMENTS,
    MaskDescriptor,
    attention_options,
    describe_mask,
    original_function,
    register,
)
from pillarattn.patch.compat import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    cache_keyword,
)
from pillarattn.patch.current_pass import speculating


@pytest.mark.parametrize("original", ["sdpa", "eager"])
def test_both_twins_are_registered_under_one_name(original):
    name = register(original)
    assert name == PREFIX + original == register(original)
    assert name in ALL_ATTENTION_FUNCTIONS
    assert name in ALL_MASK_ATTENTION_FUNCTIONS, "without it padding would be lost without a word"


def test_a_mask_is_built_once_and_only_if_asked_for():
    built = []

    def build(**arguments):
        built.append(arguments)
        return "mask"

    descriptor = MaskDescriptor(build, {"local_size": 7})
    assert descriptor.window == 7
    assert not built
    assert (descriptor.mask(), descriptor.mask()) == ("mask", "mask")
    assert built == [{"local_size": 7}]


def test_a_mask_that_is_none_is_not_built_again():
    built = []
    descriptor = MaskDescriptor(lambda **_: built.append(1), {})
    assert descriptor.mask() is None and descriptor.mask() is None
    assert len(built) == 1


def test_a_live_offset_is_copied():
    offset = torch.tensor(3)
    with speculating():
        descriptor = describe_mask("sdpa", q_offset=offset)
    offset.add_(5)
    assert int(descriptor.arguments["q_offset"]) == 3


def test_an_implementation_without_masks_gets_none():
    assert describe_mask("no such implementation") is None


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_arguments_that_kernels_do_not_compute_are_refused_by_name(name):
    module = torch.nn.Linear(2, 2)
    with pytest.raises(pillarattn.UnsupportedModelError, match=name):
        attention_options("eager", module, None, {name: torch.zeros(1)})
    assert attention_options("eager", module, None, {name: None}).window is None


def test_a_mask_of_the_models_own_is_refused():
    with pytest.raises(pillarattn.UnsupportedModelError, match="mask of its own"):
        attention_options("eager", torch.nn.Linear(2, 2), torch.zeros(1), {})


def test_options_are_read_as_the_original_reads_them():
    module, kwargs = torch.nn.Linear(2, 2), {"scaling": 0.5, "softcap": 3.0, "sliding_window": 9}
    eager = attention_options("eager", module, None, kwargs)
    assert (eager.scale, eager.softcap, eager.window) == (0.5, 3.0, 9)
    sdpa = attention_options("sdpa", module, None, kwargs)
    assert (sdpa.scale, sdpa.softcap, sdpa.window) == (0.5, None, 9)
    described = MaskDescriptor(lambda **_: None, {"local_size": 4})
    assert attention_options("sdpa", module, described, kwargs).window == 4


def test_eager_is_the_modelling_files_own(pair):
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    llama = pair("llama")[0].model.layers[0].self_attn
    gpt2 = pair("gpt2")[0].transformer.h[0].attn
    assert original_function("eager", llama) is modeling_llama.eager_attention_forward
    assert original_function("eager", gpt2) is modeling_gpt2.eager_attention_forward
    assert original_function("sdpa", llama) is ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize("sdpa_or_eager", ["llama", "gemma2"])
def test_a_run_that_ends_between_another_threads_mask_and_its_attention(
    pair, ragged, sdpa_or_eager
):
    plain, patched = pair(sdpa_or_eager)
    wanted = plain(**ragged).logits
    has_mask, has_ended, outputs = threading.Event(), threading.Event(), []

    def wait(*_):
        has_mask.set()
        assert has_ended.wait(20)

    hook = patched.model.layers[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: outputs.append(patched(**ragged).logits))
    with patched.pillarattn_record.active():
        thread.start()
        assert has_mask.wait(20)
    has_ended.set()
    thread.join(20)
    hook.remove()
    assert outputs and outputs[0].equal(wanted)


def test_a_forward_outside_a_run_passes_through_bit_for_bit(pair, family, ragged):
    """Even while another thread's run has the twins switched on."""
    plain, patched = pair(family)
    with patched.pillarattn_record.active():
        assert patched.config._attn_implementation.startswith(PREFIX)
        assert patched(**ragged).logits.equal(plain(**ragged).logits)
        keyword = {cache_keyword(): DynamicCache()}
        assert patched(**ragged, **keyword).logits.equal(plain(**ragged).logits)
        other = {cache_keyword(): pillarattn.PillarCache()}
        torch.testing.assert_close(
            patched(**ragged, **other).logits, plain(**ragged).logits, atol=1e-4, rtol=0
        )


def test_dropout_in_a_block_is_refused(pair, prompt):
    patched = pair()[1]
    cache = pillarattn.PillarCache()
    with patched.pillarattn_record.active(), torch.no_grad():
        patched(prompt(1, 6), **{cache_keyword(): cache})
        cache.step = StepState(Phase.VERIFY)
        layer = patched.model.layers[0].self_attn
        layer.attention_dropout = 0.5
        layer.train()
        try:
            with pytest.raises(pillarattn.UnsupportedModelError, match="dropout"):
                patched(prompt(1, 2), **{cache_keyword(): cache})
        finally:
            layer.eval()
            layer.attention_dropout = 0.0


def test_prefill_keeps_the_last_query_rows_of_every_layer(pair, prompt):
    patched = pair()[1]
    cache = pillarattn.PillarCache()
    step = StepState(Phase.PREFILL, seed_rows=3)
    cache.step = step
    with patched.pillarattn_record.active(), torch.no_grad():
        patched(prompt(2, 10), **{cache_keyword(): cache})
    assert step.visited == [0, 1]
    assert {i: tuple(seed.query.shape) for i, seed in step.seeds.items()} == {
        0: (2, 4, 3, 16),
        1: (2, 4, 3, 16),
    }
