"""U08, U09 and several turns: caches that go in, come out, or cannot be used."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

import pillarattn
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.compat import cache_keyword

NEW = {"max_new_tokens": 7, "do_sample": False}


def given(cache):
    """Return the argument under which this version takes a cache."""
    return {cache_keyword(): cache}


class Int8Layer(QuantizedLayer):
    """A quantised layer that needs no backend."""

    def __init__(self):
        super().__init__()
        self.nbits, self.axis_key, self.axis_value, self.q_group_size = 8, 0, 0, 64

    def _quantize(self, tensor, axis=None):
        return (tensor * 16).round().to(torch.int8)

    def _dequantize(self, q_tensor):
        return q_tensor.float() / 16


REFUSED = {
    "offloaded": (lambda config: DynamicCache(offloading=True), "offloading"),
    "offloaded static": (
        lambda config: StaticCache(config=config, max_cache_len=18, offloading=True),
        "offloading|StaticLayer",
    ),
    "quantised": (lambda config: Cache(layers=[Int8Layer(), Int8Layer()]), "Int8Layer"),
    "encoder-decoder": (
        lambda config: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "EncoderDecoderCache",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_u08_a_cache_that_cannot_roll_back_is_refused_by_class(
    plain, patched, prompt, rejecting, kind
):
    make, names = REFUSED[kind]
    calls = []
    hook = patched.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(UnsupportedOptionError, match=names):
            patched.generate(
                prompt(2, 12), **NEW, **given(make(plain.config)), assistant=rejecting()
            )
    finally:
        hook.remove()
    assert not calls
    want = plain.generate(prompt(2, 12), **NEW)
    assert patched.generate(prompt(2, 12), **NEW, assistant=rejecting()).equal(want)


def test_u08_rejected_drafts_leave_nothing_behind(plain, patched, prompt):
    """Drafts from the least likely token, so that all are rejected."""
    asked = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    want = plain.generate(prompt(2, 12), **asked)
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, s=0.01, min_budget=1, recent=1, sink=0)
    got = patched.generate(prompt(2, 12), **asked, assistant=pillar)
    assert pillar.stats.accepted < pillar.stats.drafted / 2
    assert got.sequences.tolist() == want.sequences.tolist()
    theirs, mine = want[cache_keyword()], got[cache_keyword()]
    assert mine.get_seq_length() == theirs.get_seq_length() == 23
    for a, b in zip(theirs.layers, mine.layers, strict=True):
        torch.testing.assert_close(b.keys, a.keys, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(b.values, a.values, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("way", ["name", "object"])
def test_u09_a_static_cache_of_exactly_the_size_that_plain_decoding_needs(
    plain, patched, prompt, accepting, rejecting, way
):
    """Stock assisted decoding writes its drafts past the end, or refuses."""
    new = {"max_new_tokens": 13, "do_sample": False}
    made = []

    def cached():
        if way == "name":
            return {"cache_implementation": "static"}
        made.append(StaticCache(config=plain.config, max_cache_len=12 + 13 - 1))
        return given(made[-1])

    want = plain.generate(prompt(1, 12), **new, **cached())
    with pytest.raises((IndexError, ValueError)):
        plain.generate(
            prompt(1, 12), **new, **cached(), prompt_lookup_num_tokens=7, max_matching_ngram_size=1
        )
    for pillar in (accepting, rejecting()):
        assert patched.generate(prompt(1, 12), **new, **cached(), assistant=pillar).equal(want)
    if made:
        for theirs, mine in zip(made[0].layers, made[-1].layers, strict=True):
            assert int(mine.get_seq_length()) == int(theirs.get_seq_length()) == 24
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-5)


def test_u09_a_static_cache_that_is_too_small_names_the_size(patched, prompt, accepting):
    small = StaticCache(config=patched.config, max_cache_len=17)
    with pytest.raises(
        UnsupportedOptionError, match=r"room for 17 .* may need 18; .*max_cache_len=18"
    ):
        patched.generate(prompt(1, 12), **NEW, **given(small), assistant=accepting)
    assert int(small.get_seq_length()) == 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_u09_turns_over_a_static_cache(tiny_model, prompt, rejecting, family):
    """Mistral's window of 16 tokens is crossed in the first turn."""
    plain, patched = tiny_model(family), pillarattn.patch(tiny_model(family))
    outputs = []
    for model, assistant in ((plain, {}), (patched, {"assistant": rejecting()})):
        cache = StaticCache(config=model.config, max_cache_len=60)
        first = model.generate(prompt(2, 14), **NEW, **given(cache), **assistant)
        held = int(cache.get_seq_length())
        ids = torch.cat([first, prompt(2, 5, seed=2)], dim=1)
        call = {"attention_mask": torch.ones_like(ids), **NEW}
        second = model.generate(ids, **call, **given(cache), **assistant)
        outputs.append((first.tolist(), held, second.tolist(), int(cache.get_seq_length())))
    assert outputs[0] == outputs[1]
    wrong = StaticCache(config=patched.config, max_cache_len=60)
    patched.generate(prompt(1, 14), **NEW, **given(wrong), assistant=rejecting())
    wrong.reset()
    with pytest.raises(UnsupportedOptionError, match="holds 1 rows and the batch has 2"):
        patched.generate(prompt(2, 14), **NEW, **given(wrong), assistant=rejecting())


def turns(model, assistant, make_cache, start, more, eos):
    """Run three turns over one cache; return each turn's ids, and the cache."""
    ids, mask, cache, outputs = *start, make_cache(), []
    for extra in [*more, None]:
        ids = model.generate(
            ids, attention_mask=mask, **NEW, eos_token_id=eos, **given(cache), **assistant
        )
        outputs.append(ids.tolist())
        assert cache.get_seq_length() == ids.shape[1] - 1
        if extra is None:
            return outputs, cache
        # What finished rows were padded with is hidden from the next turn, as a user would.
        new = (ids[:, mask.shape[1] :] != 0).long()
        ids = torch.cat([ids, extra], dim=1)
        mask = torch.cat([mask, new, torch.ones_like(extra)], dim=1)
    return outputs, cache


@pytest.mark.parametrize(
    ("make_cache", "ends"),
    [(pillarattn.PillarCache, True), (DynamicCache, True), (pillarattn.PillarCache, False)],
)
def test_several_turns_of_a_ragged_batch_with_rows_that_end_early(
    plain, patched, prompt, rejecting, make_cache, ends
):
    mask = (torch.arange(14) >= 14 - torch.tensor([6, 11, 14])[:, None]).long()
    start = prompt(3, 14) * mask, mask
    more = [prompt(3, 4, seed=seed) for seed in (2, 3)]
    free = plain.generate(start[0], attention_mask=mask, **NEW)[:, 14:]
    eos = [int(free[0, 2]), int(free[1, 5])] if ends else None
    want, _ = turns(plain, {}, DynamicCache, start, more, eos)
    got, _ = turns(patched, {"assistant": rejecting()}, make_cache, start, more, eos)
    assert got == want
    if ends:
        assert 0 in want[0][0][16:]


class LeavesAt:
    """A streamer whose reader goes away at its n-th token."""

    def __init__(self, n):
        self.left = n

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError("the reader went away")

    def end(self):
        """Do nothing."""


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("fails", ["in the prompt", "in a round"])
def test_a_failed_run_leaves_an_earlier_turn_in_its_cache(
    plain, patched, prompt, rejecting, padded, fails
):
    mask = torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[0, :5] = 0
    cache = pillarattn.PillarCache()
    first = patched.generate(
        prompt(2, 12), attention_mask=mask, **NEW, **given(cache), assistant=rejecting()
    )
    ids = torch.cat([first, prompt(2, 4, seed=2)], dim=1)
    mask = torch.cat([mask, torch.ones(2, ids.shape[1] - 12, dtype=torch.long)], dim=1)
    call = {"attention_mask": mask, **NEW}
    want = plain.generate(ids, **call)
    held = cache.get_seq_length()
    if fails == "in a round":
        with pytest.raises(BrokenPipeError):
            patched.generate(
                ids, **call, **given(cache), assistant=rejecting(), streamer=LeavesAt(4)
            )
    else:
        hook = patched.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            patched.generate(ids, **call, **given(cache), assistant=rejecting())
        hook.remove()
    assert cache.get_seq_length() == held
    assert patched.generate(ids, **call, **given(cache), assistant=rejecting()).equal(want)


def test_a_failed_run_leaves_an_empty_cache_empty(patched, prompt, rejecting):
    cache = pillarattn.PillarCache()
    with pytest.raises(BrokenPipeError):
        patched.generate(
            prompt(1, 12), **NEW, **given(cache), assistant=rejecting(), streamer=LeavesAt(5)
        )
    assert cache.get_seq_length() == 0


def test_a_copy_of_a_returned_cache_branches_a_conversation(plain, patched, prompt, rejecting):
    cache = pillarattn.PillarCache()
    first = patched.generate(prompt(1, 12), **NEW, **given(cache), assistant=rejecting())
    for seed in (2, 3):
        ids = torch.cat([first, prompt(1, 4, seed=seed)], dim=1)
        call = {"attention_mask": torch.ones_like(ids), **NEW}
        branch = copy.deepcopy(cache)
        got = patched.generate(ids, **call, **given(branch), assistant=rejecting())
        assert got.equal(plain.generate(ids, **call))
    assert cache.get_seq_length() == first.shape[1] - 1
