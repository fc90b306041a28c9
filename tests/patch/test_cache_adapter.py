"""Caches that go in and come out: what they hold, and that another turn can build on them."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import pillarattn
from pillarattn.datatypes import RowLengths, Selection
from pillarattn.patch.compat import cache_keyword

DICT = {"return_dict_in_generate": True}


def cache_of(output):
    """Return the cache of generate's output, under the name that this version gives it."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def argument(model, cache):
    """Return the keyword under which generate takes a cache without a deprecation warning."""
    return {cache_keyword(): cache}


def check_caches(wanted, got, mask=None):
    """Compare length, and keys and values on positions that `mask` `[B, S]` leaves visible.

    Values are of the order of 10, so that 1e-4 is a relative 1e-5.
    """
    assert got.get_seq_length() == wanted.get_seq_length()
    assert len(got.layers) == len(wanted.layers)
    for theirs, mine in zip(wanted.layers, got.layers, strict=True):
        for a, b in ((theirs.keys, mine.keys), (theirs.values, mine.values)):
            assert b.shape == a.shape
            if mask is None:
                seen = torch.ones(a.shape[0], a.shape[2], dtype=torch.bool)
            else:
                seen = torch.ones(a.shape[0], wanted.get_seq_length(), dtype=torch.bool)
                seen[:, : mask.shape[1]] = mask.bool()
                seen = seen[:, -a.shape[2] :]
            seen = seen[:, None, :, None].expand_as(a)
            torch.testing.assert_close(b[seen], a[seen], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("s", [0.3, 1.0])
def test_the_returned_cache_is_what_plain_decoding_leaves(pair, ragged, drafting, family, s):
    plain, patched = pair(family)
    kwargs = {**ragged, "max_new_tokens": 16, "do_sample": False, **DICT}
    wanted = plain.generate(**kwargs)
    pillar = drafting(s=s)
    got = patched.generate(**kwargs, assistant=pillar)
    assert got.sequences.tolist() == wanted.sequences.tolist()
    assert type(cache_of(got)) is type(cache_of(wanted))
    check_caches(cache_of(wanted), cache_of(got), ragged["attention_mask"])
    if s < 1:
        assert pillar.stats.accepted < pillar.stats.drafted


def test_the_cache_of_rows_that_finished_early(pair, ragged, drafting):
    plain, patched = pair()
    kwargs = {**ragged, "do_sample": False, "max_new_tokens": 18}
    free = plain.generate(**kwargs)[:, 24:]
    kwargs["eos_token_id"] = [int(free[0, 2]), int(free[1, 9])]
    wanted = plain.generate(**kwargs, **DICT)
    got = patched.generate(**kwargs, **DICT, assistant=drafting(s=0.8))
    check_caches(cache_of(wanted), cache_of(got), ragged["attention_mask"])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_second_turn_goes_on_from_the_returned_cache(pair, prompt, drafting, family, batch):
    plain, patched = pair(family)
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    first = plain.generate(prompt(batch, 12), **kwargs)
    turn = torch.cat([first, prompt(batch, 6, seed=2)], dim=1)
    # Token 0 may have been generated, and generate would take it for padding.
    kwargs["attention_mask"] = torch.ones_like(turn)
    wanted = plain.generate(turn, **kwargs).tolist()
    for model, assistant in ((plain, {}), (patched, {}), (patched, {"assistant": drafting()})):
        before = patched.generate(
            prompt(batch, 12), max_new_tokens=12, do_sample=False, **DICT, assistant=drafting()
        )
        cache = cache_of(before)
        got = model.generate(turn, **kwargs, **argument(model, cache), **assistant)
        assert got.tolist() == wanted
        assert cache.get_seq_length() == got.shape[1] - 1


def test_a_padded_second_and_third_turn(pair, ragged, prompt, drafting):
    plain, patched = pair()
    outputs = []
    for model, assistant in ((plain, {}), (patched, {"assistant": drafting()})):
        cache, ids, mask = DynamicCache(), ragged["input_ids"], ragged["attention_mask"]
        for turn in range(3):
            ids = model.generate(
                ids, attention_mask=mask, max_new_tokens=6, do_sample=False,
                **argument(model, cache), **assistant,
            )  # fmt: skip
            outputs.append(ids.tolist())
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, prompt(4, 3, seed=turn)], dim=1)
            mask = torch.cat([mask, mask.new_ones(4, ids.shape[1] - mask.shape[1])], dim=1)
    assert outputs[:3] == outputs[3:]


def test_a_turn_that_passes_only_its_new_tokens(pair, prompt, drafting):
    """The mask covers the whole text, the ids only what the cache lacks."""
    plain, patched = pair()
    results = []
    for model, assistant in ((plain, {}), (patched, {"assistant": drafting()})):
        cache = DynamicCache()
        kwargs = {"max_new_tokens": 8, "do_sample": False, **argument(model, cache), **assistant}
        full = model.generate(prompt(2, 10), **kwargs)
        full = torch.cat([full, prompt(2, 5, seed=3)], dim=1)
        new = model.generate(full[:, -6:], attention_mask=torch.ones_like(full), **kwargs)
        results.append((new.tolist(), cache))
    assert results[1][0] == results[0][0]
    check_caches(results[0][1], results[1][1])


@pytest.mark.parametrize("mask", ["none", "left"])
def test_a_prompt_of_embeddings_leaves_the_same_cache(pair, ragged, prompt, drafting, mask):
    plain, patched = pair()
    ids, seen = (prompt(2, 10), None) if mask == "none" else tuple(ragged.values())
    kwargs = {
        "inputs_embeds": plain.get_input_embeddings()(ids), "max_new_tokens": 8,
        "do_sample": False, **({} if seen is None else {"attention_mask": seen}), **DICT,
    }  # fmt: skip
    wanted, got = plain.generate(**kwargs), patched.generate(**kwargs, assistant=drafting())
    assert got.sequences.tolist() == wanted.sequences.tolist()
    check_caches(cache_of(wanted), cache_of(got), seen)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_users_dynamic_cache_is_filled_in_place(pair, prompt, drafting, family):
    plain, patched = pair(family)
    for make in (DynamicCache, lambda: DynamicCache(config=plain.config)):
        theirs, mine = make(), make()
        kwargs = {"max_new_tokens": 10, "do_sample": False}
        plain.generate(prompt(2, 20), **kwargs, **argument(plain, theirs))
        patched.generate(prompt(2, 20), **kwargs, **argument(patched, mine), assistant=drafting())
        check_caches(theirs, mine)
        again = DynamicCache()
        out = patched.generate(
            prompt(2, 20), **kwargs, **DICT, **argument(patched, again), assistant=drafting()
        )
        assert cache_of(out) is again


def test_a_users_pillar_cache_is_filled_and_reused(pair, prompt, drafting):
    plain, patched = pair()
    kwargs = {"max_new_tokens": 10, "do_sample": False}
    cache = pillarattn.PillarCache()
    out = patched.generate(
        prompt(2, 12), **kwargs, **DICT, **argument(patched, cache), assistant=drafting()
    )
    wanted = plain.generate(prompt(2, 12), **kwargs, **DICT)
    assert cache_of(out) is cache
    check_caches(cache_of(wanted), cache)
    turn = torch.cat([out.sequences, prompt(2, 4, seed=2)], dim=1)
    got = patched.generate(turn, **kwargs, **argument(patched, cache), assistant=drafting())
    assert got.tolist() == plain.generate(turn, **kwargs).tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_plain_generate_takes_a_pillar_cache(pair, ragged, family):
    for model in pair(family):
        kwargs = {**ragged, "max_new_tokens": 12, "do_sample": False}
        cache = pillarattn.PillarCache()
        got = model.generate(**kwargs, **argument(model, cache))
        assert got.tolist() == model.generate(**kwargs).tolist()
        assert cache.get_seq_length() == got.shape[1] - 1


def test_a_pillar_cache_serves_assisted_generation_and_beams(pair, prompt):
    plain = pair()[0]
    kwargs = {"max_new_tokens": 10, "do_sample": False}
    cached = argument(plain, pillarattn.PillarCache())
    lookup = {**kwargs, "prompt_lookup_num_tokens": 3}
    ids = prompt(1, 6).repeat(1, 3)
    assert plain.generate(ids, **lookup, **cached).equal(plain.generate(ids, **lookup))
    beams = {**kwargs, "num_beams": 3}
    cached = argument(plain, pillarattn.PillarCache())
    assert plain.generate(ids, **beams, **cached).equal(plain.generate(ids, **beams))


def test_buffers_are_not_reallocated_within_a_power_of_two(pair, prompt, drafting):
    """Also with a prompt of embeddings, whose length `max_length` does not count."""
    plain, patched = pair()
    for inputs in (
        {"input_ids": prompt(1, 70)},
        {"inputs_embeds": plain.get_input_embeddings()(prompt(1, 70))},
    ):
        seen = []

        def watch(module, args, kwargs, seen=seen):
            cache = kwargs[cache_keyword()]
            if cache.used_layers:
                seen.append(cache.layers[0].key_buffer.data_ptr())

        handle = patched.register_forward_pre_hook(watch, with_kwargs=True)
        try:
            patched.generate(**inputs, max_new_tokens=12, do_sample=False, assistant=drafting())
        finally:
            handle.remove()
        assert len(seen) > 10
        assert len(set(seen)) <= 2, f"{len(set(seen))} buffers"


def test_an_exception_leaves_no_step_on_a_users_cache(pair, prompt, drafting):
    patched, cache = pair()[1], pillarattn.PillarCache()

    def fail(*_):
        raise RuntimeError("out of memory")

    handle = patched.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            patched.generate(
                prompt(1, 8), max_new_tokens=4, do_sample=False, assistant=drafting(),
                **argument(patched, cache),
            )  # fmt: skip
    finally:
        handle.remove()
    assert cache.step is None


def test_layers_that_begin_together_share_their_lengths():
    """Each of its own would be a copy to the device, and a kernel."""
    cache, two = pillarattn.PillarCache(), torch.zeros(2, 2, 5, 16)
    for layer in range(3):
        cache.update(two, two, layer)
    assert all(layer.lengths is cache.layers[0].lengths for layer in cache.layers)
    assert cache.lengths.host == (5, 5)
    other, three = pillarattn.PillarCache(), torch.zeros(3, 2, 4, 16)
    other.update(two, two, 0)
    other.update(three, three, 1)
    assert [layer.lengths.host for layer in other.layers] == [(5, 5), (4, 4, 4)]


def test_a_roll_back_is_checked_for_each_length_that_layers_have():
    cache, two = pillarattn.PillarCache(), torch.zeros(2, 2, 5, 16)
    for layer in range(4):
        cache.update(two, two, layer)
    shorter = RowLengths([3, 4], "cpu")
    cache.roll_back(shorter)
    assert all(layer.lengths is shorter for layer in cache.layers)
    with pytest.raises(ValueError, match="cannot roll back"):
        cache.roll_back(RowLengths([3, 5], "cpu"))
    cache.layers[2].roll_back(RowLengths([3, 2], "cpu"))
    with pytest.raises(ValueError, match=r"rows of \[3, 2\] tokens to \[3, 3\]"):
        cache.roll_back(RowLengths([3, 3], "cpu"))


def test_a_roll_back_cuts_what_drafts_have_gathered():
    cache, two = pillarattn.PillarCache(), torch.randn(1, 2, 5, 16)
    for layer in range(2):
        cache.update(two, two, layer)
    indices = torch.zeros(1, 2, 1, dtype=torch.int32)
    start = torch.tensor([4])
    chosen = Selection(indices, torch.ones(1, 2, dtype=torch.int32), start)
    kept, tail = cache.layers[1].kept_keys(chosen, cache.lengths)
    assert (kept.filled, tail) == (1, 1)
    cache.roll_back(RowLengths([4], "cpu"))
    assert kept.filled == 0
