"""fp32 weights under `torch.autocast`: values come in half precision, keys and queries do not."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import pillarattn
from pillarattn.patch.autocast import as_attended
from pillarattn.patch.compat import cache_keyword

NEW = {"max_new_tokens": 14, "do_sample": False}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_are_rounded_inside_an_autocast_block_alone(dtype):
    given = torch.randn(2), torch.randn(2).double(), torch.randn(2).half()
    assert all(a is b for a, b in zip(given, as_attended(*given), strict=True))
    with torch.autocast("cpu", dtype):
        rounded = as_attended(*given)
        with torch.autocast("cpu", enabled=False):
            assert as_attended(*given)[0] is given[0]
    assert [t.dtype for t in rounded] == [dtype, torch.float64, dtype]
    assert as_attended(torch.empty(1, device="meta"))[0].dtype == torch.float32


@torch.no_grad()
def test_generate(pair, prompt, drafting, family):
    """Tokens are plain decoding's, up to the first pair that half precision cannot tell apart."""
    plain, patched = pair(family)
    ids = prompt(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        out = patched.generate(ids, **NEW, assistant=drafting())
        report = pillarattn.check_lossless(patched, ids, drafting(), max_new_tokens=14)
        wanted = plain.generate(ids, **NEW)
    assert out.shape == wanted.shape == (2, 54)
    if report.lossless:
        assert out.equal(wanted)
    else:
        # Two units in the last place of the logits.
        allowed = 2 * torch.finfo(torch.bfloat16).eps * float(plain(wanted).logits.abs().max())
        assert report.first_difference.logit_gap <= allowed


def test_a_model_is_tried_by_itself_when_it_is_patched_in_a_block(tiny_model):
    model = tiny_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        pillarattn.patch(model)
    assert model.pillarattn_record.dense_reason is None


def test_the_cache_keeps_what_attention_reads(pair, prompt, drafting):
    _, patched = pair("llama")
    cache = pillarattn.PillarCache()
    with torch.autocast("cpu", torch.bfloat16):
        patched.generate(prompt(2, 40), **NEW, **{cache_keyword(): cache}, assistant=drafting())
    keys, values = cache.layers[0].key_buffer, cache.layers[0].value_buffer
    assert keys.dtype == values.dtype == torch.bfloat16


def test_a_cache_that_plain_decoding_has_begun(pair, prompt, drafting):
    _, patched = pair("llama")
    cache, ids = DynamicCache(), prompt(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        given = {cache_keyword(): cache}
        begun = patched.generate(ids, max_new_tokens=6, do_sample=False, **given)
        assert cache.layers[0].keys.dtype != cache.layers[0].values.dtype
        out = patched.generate(begun, **NEW, **given, assistant=drafting())
    assert out.shape == (2, 60)
