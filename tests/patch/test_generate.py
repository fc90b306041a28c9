"""`generate(assistant=)`: every way of handing over a prompt gives what plain decoding gives."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import pillarattn
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.compat import cache_keyword

NEW = {"max_new_tokens": 14, "do_sample": False}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("mask", ["hole", "holes", "right", "left and right"])
def test_holed_and_right_padded_masks(pair, prompt, same, drafting, family, mask):
    """A window counts masked positions too, so that dropping them would widen it."""
    ids = prompt(2, 24)
    seen = torch.ones_like(ids)
    if mask == "hole":
        seen[0, 14:19] = 0
    elif mask == "holes":
        seen[0, 2::3], seen[1, 20] = 0, 0
    else:
        seen[0, -5:] = 0
    if mask == "left and right":
        seen[1, :4] = 0
    try:
        same(*pair(family), drafting(s=0.8), input_ids=ids, attention_mask=seen, **NEW)
    except UnsupportedOptionError as refusal:
        if family == "llama" or "attention_mask" not in str(refusal):
            raise


def test_a_row_that_is_masked_throughout(pair, prompt, same, drafting):
    ids = prompt(2, 8)
    seen = torch.ones_like(ids)
    seen[0] = 0
    same(*pair(), drafting(), input_ids=ids, attention_mask=seen, **NEW)


def test_without_a_mask_and_with_the_padding_token_in_the_prompt(pair, prompt, same, drafting):
    ids = prompt(2, 12)
    same(*pair(), drafting(), input_ids=ids, **NEW)
    ids[0, :3] = 0
    ids[1, 5] = 0
    same(*pair(), drafting(), input_ids=ids, **NEW)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(pair, family, prompt, same, drafting, length):
    same(*pair(family), drafting(), input_ids=prompt(2, length), max_new_tokens=8)


def test_no_prompt_at_all_but_a_bos_token(pair, same, drafting):
    same(*pair(), drafting(), bos_token_id=5, **NEW)


@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_of_embeddings(pair, ragged, same, drafting, padded):
    plain, patched = pair()
    embeds = plain.get_input_embeddings()(ragged["input_ids"])
    mask = {"attention_mask": ragged["attention_mask"]} if padded else {}
    out = same(plain, patched, drafting(), inputs_embeds=embeds, **mask, **NEW)
    assert out.shape == (4, 14)
    same(
        plain, patched, drafting(), inputs_embeds=embeds, input_ids=ragged["input_ids"], **mask,
        **NEW,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_prompt_in_chunks(pair, ragged, same, drafting, family, size):
    same(*pair(family), drafting(), **ragged, prefill_chunk_size=size, **NEW)


def test_positions_of_the_callers_own(pair, prompt, same, drafting):
    positions = torch.arange(10).expand(2, -1) * 2 + 3
    same(*pair(), drafting(), input_ids=prompt(2, 10), position_ids=positions, **NEW)


def test_token_types(pair, prompt, same, drafting):
    types = prompt(2, 10, seed=5)
    out = same(*pair("gpt2"), drafting(), input_ids=prompt(2, 10), token_type_ids=types, **NEW)
    assert out.tolist() != pair("gpt2")[0].generate(prompt(2, 10), **NEW).tolist()


def test_a_generation_config_object_is_followed_and_left_alone(pair, prompt, same, drafting):
    config = GenerationConfig(max_new_tokens=14, do_sample=False, repetition_penalty=1.4)
    before = config.to_dict()
    out = same(*pair(), drafting(), input_ids=prompt(2, 10), generation_config=config)
    assert out.shape[1] == 24
    positional = pair()[1].generate(prompt(2, 10), config, assistant=drafting())
    assert positional.tolist() == out.tolist()
    assert config.to_dict() == before


def test_the_models_own_generation_config_is_followed(tiny_model, prompt, drafting):
    plain, patched = tiny_model("llama"), pillarattn.patch(tiny_model("llama"))
    for model in (plain, patched):
        model.generation_config.max_new_tokens = 9
        model.generation_config.repetition_penalty = 1.5
    out = patched.generate(prompt(1, 6), do_sample=False, assistant=drafting())
    assert out.tolist() == plain.generate(prompt(1, 6), do_sample=False).tolist()
    assert out.shape[1] == 15


def test_k_0_is_plain_decoding(pair, ragged, same, drafting, forwards):
    pillar = drafting(k=0)
    with forwards(pair()[1]) as calls:
        same(*pair(), pillar, **ragged, **NEW)
    assert calls == [14]
    assert (pillar.stats.drafted, pillar.stats.accepted) == (0, 0)
    assert pillar.stats.emitted == 4 * 13


def test_custom_generate_is_the_same_call(pair, ragged, same, drafting):
    plain, patched = pair()
    wanted = plain.generate(**ragged, **NEW).tolist()
    for call in (patched.generate, lambda **kw: type(patched).generate(patched, **kw)):
        pillar = drafting()
        assert call(**ragged, **NEW, custom_generate=pillar).tolist() == wanted
        assert pillar.stats.drafted > 0


def test_custom_generate_streams_on_a_patched_model(pair, prompt, drafting):
    class Keep:
        def __init__(self):
            self.tokens, self.ends = [], 0

        def put(self, value):
            self.tokens.extend(value.flatten().tolist())

        def end(self):
            self.ends += 1

    streamer = Keep()
    out = pair()[1].generate(prompt(1, 8), **NEW, custom_generate=drafting(), streamer=streamer)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ends == 1


def test_another_custom_generate_goes_to_stock_generate(pair, prompt):
    def theirs(model, input_ids, **kwargs):
        return input_ids + 1

    out = pair()[1].generate(prompt(1, 8), max_new_tokens=4, custom_generate=theirs)
    assert out.equal(prompt(1, 8) + 1)


def test_generate_still_looks_like_generate(pair):
    parameters = inspect.signature(pair()[1].generate).parameters
    assert "assistant" in parameters
    assert "kwargs" in parameters


def test_one_generator_serves_many_models_and_calls(pair, prompt, same, drafting):
    pillar = drafting()
    for family in ("llama", "mistral", "gpt2"):
        same(*pair(family), pillar, input_ids=prompt(2, 20), max_new_tokens=8)
        same(*pair(family), pillar, input_ids=prompt(1, 9), max_new_tokens=8)


def test_an_exception_inside_leaves_the_model_as_it_was(pair, prompt, same, drafting):
    plain, patched = pair()
    attention = plain.config._attn_implementation
    for at in (1, 2, 8):
        calls = [0]

        def fail(*_, calls=calls, at=at):
            calls[0] += 1
            if calls[0] == at:
                raise RuntimeError("out of memory")

        handle = patched.model.layers[1].register_forward_pre_hook(fail)
        try:
            with pytest.raises(RuntimeError, match="out of memory"):
                patched.generate(prompt(1, 8), **NEW, assistant=drafting())
        finally:
            handle.remove()
        assert patched.config._attn_implementation == attention
    same(plain, patched, drafting(), input_ids=prompt(1, 8), **NEW)
    assert patched(prompt(1, 8)).logits.equal(plain(prompt(1, 8)).logits)


def run_together(*calls):
    """Run each call in a thread of its own, several times; return all results."""
    barrier, results, errors = threading.Barrier(len(calls)), [[] for _ in calls], []

    def work(i, call):
        try:
            barrier.wait(20)
            for _ in range(2):
                results[i].append(call().tolist())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results


def test_two_models_and_one_generator_in_two_threads(pair, prompt, drafting):
    pillar, ids = drafting(), prompt(2, 20)
    models = [pair("llama"), pair("qwen2")]
    wanted = [plain.generate(ids, **NEW).tolist() for plain, _ in models]
    results = run_together(
        *[lambda m=m: m.generate(ids, **NEW, assistant=pillar) for _, m in models]
    )
    assert results == [[tokens] * 2 for tokens in wanted]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_speculating_and_plain_threads_on_one_model(pair, ragged, prompt, drafting, family):
    plain, patched = pair(family)
    ids = prompt(2, 20)
    wanted = [
        plain.generate(**ragged, **NEW).tolist(),
        plain.generate(ids, **NEW).tolist(),
        plain.generate(ids, **NEW).tolist(),
    ]
    results = run_together(
        lambda: patched.generate(**ragged, **NEW),
        lambda: patched.generate(ids, **NEW, assistant=drafting()),
        lambda: patched.generate(
            ids, **NEW, **{cache_keyword(): DynamicCache()}, assistant=drafting(k=2)
        ),
    )
    assert results == [[tokens] * 2 for tokens in wanted]
    assert not patched.config._attn_implementation.startswith("pillarattn")
