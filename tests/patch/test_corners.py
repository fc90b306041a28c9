"""Corners of a generate call: positional arguments, grammars past an end, failed runs."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.patch.compat import cache_keyword


class Recording:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value.reshape(-1).tolist())

    def end(self):
        self.ended += 1


@pytest.fixture
def model(tiny_model):
    return pillarattn.patch(tiny_model("llama"))


def pillar(**options):
    return pillarattn.SelfSpeculativeGenerator(k=4, s=1.0, min_budget=4, **options)


def test_a_positional_streamer_is_served(model):
    ids, streamer = torch.randint(1, 97, (1, 12)), Recording()
    config = model.generation_config
    config.max_length = 20
    out = model.generate(
        ids, config, None, None, None, None, None, streamer, do_sample=False, assistant=pillar()
    )
    assert [t for put in streamer.got for t in put] == out[0].tolist()
    assert len(streamer.got) == 9
    assert streamer.ended == 1


def test_a_grammar_that_ends_with_the_text_is_not_asked_beyond(model, tiny_model):
    ids = torch.randint(10, 97, (1, 12))
    script = [20, 21, 22, 23, 5]

    def grammar(batch, text):
        place = len(text) - 12
        return [script[place]] if 5 not in text[12:].tolist() else []

    options = {"eos_token_id": 5, "pad_token_id": 0, "max_new_tokens": 16, "do_sample": False}
    plain = tiny_model("llama").generate(ids, prefix_allowed_tokens_fn=grammar, **options)
    got = model.generate(ids, prefix_allowed_tokens_fn=grammar, assistant=pillar(), **options)
    assert got.tolist() == plain.tolist()
    assert got[0, 12:].tolist() == script


def test_a_grammar_that_is_silent_where_it_matters_still_raises(model):
    ids = torch.randint(1, 97, (1, 12))
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn"):
        model.generate(
            ids, prefix_allowed_tokens_fn=lambda *_: [], max_new_tokens=8, assistant=pillar()
        )


def test_a_failed_run_leaves_no_ragged_cache(model):
    cache = pillarattn.PillarCache()
    ids = torch.randint(1, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def fails(text, scores, **_):
        if text.shape[1] > 15:
            raise RuntimeError("stop here")
        return torch.zeros(len(text), dtype=torch.bool)

    with pytest.raises(RuntimeError, match="stop here"):
        model.generate(
            ids,
            attention_mask=mask,
            **{cache_keyword(): cache},
            stopping_criteria=[fails],
            max_new_tokens=12,
            assistant=pillar(),
        )
    assert cache.get_seq_length() == 0


def test_an_attention_that_cannot_be_wrapped_is_refused_after_patching(model):
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(pillarattn.UnsupportedModelError, match="flex_attention"):
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, assistant=pillar())


def test_kernels_that_do_not_exist_are_refused_before_compute(model):
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="triton"):
        model.generate(
            torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, assistant=pillar(kernels="triton")
        )
    hook.remove()
    assert not calls


@pytest.mark.parametrize("options", [{}, {"drafter": ("ngram", "sparse")}, {"strategy": "h2o"}])
def test_the_default_device_may_be_another_than_the_models(
    pair, drafting, prompt, monkeypatch, options
):
    plain, patched = pair()
    ids = prompt(2, 20)
    decode = pillarattn.SelfSpeculativeGenerator.__call__

    def elsewhere(*arguments, **prepared):
        with torch.device("meta"):
            return decode(*arguments, **prepared)

    monkeypatch.setattr(pillarattn.SelfSpeculativeGenerator, "__call__", elsewhere)
    out = patched.generate(ids, max_new_tokens=20, do_sample=False, assistant=drafting(**options))
    assert torch.equal(out, plain.generate(ids, max_new_tokens=20, do_sample=False))
