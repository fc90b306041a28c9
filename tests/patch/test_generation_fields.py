"""Every option of `generate` is decided, and every decision is true: a walk over the table."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)

import pillarattn
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch import options
from pillarattn.patch.generation_fields import (
    GENERATE_ARGUMENTS,
    GENERATION_FIELDS,
    Verdict,
    markdown_table,
)

PROMPT, NEW = 8, 8
# Fields that only older versions have.
GONE = {"_commit_hash"}


class Shift(LogitsProcessor):
    """Moves every score by the newest token."""

    def __call__(self, input_ids, scores):
        place = torch.arange(scores.shape[1]) * input_ids[:, -1:]
        return scores + 3 * torch.sin(place.float())


class EndsAt(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= PROMPT + 6)


class Keep:
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        self.tokens.append(None)


def words():
    """Return a tokenizer of one word a token, "w1" to "w96"."""
    names = {"abcdef": 0, **{f"w{i}": i for i in range(1, 97)}}
    inner = Tokenizer(models.WordLevel(names, unk_token="abcdef"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="abcdef", unk_token="abcdef")


# Honoured options of greedy decoding: what to pass, given the tokens that come without it, and what
# must be there for it to act.
GREEDY = {
    "max_length": (lambda new: {"max_length": PROMPT + 5}, {"max_new_tokens": None}),
    "max_new_tokens": (lambda new: {"max_new_tokens": 5}, {}),
    "min_length": (lambda new: {"min_length": PROMPT + 6}, {"eos_token_id": 2}),
    "min_new_tokens": (lambda new: {"min_new_tokens": 6}, {"eos_token_id": 2}),
    "max_time": (lambda new: {"max_time": 0.0}, {}),
    "stop_strings": (lambda new: {"stop_strings": [f"w{new[3]}"]}, {"tokenizer": words()}),
    "eos_token_id": (lambda new: {"eos_token_id": [new[3], new[5]]}, {}),
    "repetition_penalty": (lambda new: {"repetition_penalty": 1.8}, {}),
    "encoder_repetition_penalty": (lambda new: {"encoder_repetition_penalty": 3.0}, {}),
    "no_repeat_ngram_size": (lambda new: {"no_repeat_ngram_size": 1}, {}),
    "encoder_no_repeat_ngram_size": (lambda new: {"encoder_no_repeat_ngram_size": 1}, {}),
    "bad_words_ids": (lambda new: {"bad_words_ids": [[new[4]], [new[0], new[1]]]}, {}),
    "sequence_bias": (lambda new: {"sequence_bias": [[[new[2]], -50.0], [[5, 8], 9.0]]}, {}),
    "suppress_tokens": (lambda new: {"suppress_tokens": new[2:5]}, {}),
    "begin_suppress_tokens": (lambda new: {"begin_suppress_tokens": new[:1]}, {}),
    "forced_bos_token_id": (lambda new: {"forced_bos_token_id": 7}, {"one token": True}),
    "forced_eos_token_id": (lambda new: {"forced_eos_token_id": 9}, {}),
    "exponential_decay_length_penalty": (
        lambda new: {"exponential_decay_length_penalty": (2, 2.5)},
        {"eos_token_id": 96},
    ),
    "watermarking_config": (
        lambda new: {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 9.0}},
        {},
    ),
    "pad_token_id": (lambda new: {"pad_token_id": 3}, {"eos_token_id": 2}),
    "logits_processor": (lambda new: {"logits_processor": [Shift()]}, {}),
    "stopping_criteria": (lambda new: {"stopping_criteria": [EndsAt()]}, {}),
    "prefix_allowed_tokens_fn": (
        lambda new: {"prefix_allowed_tokens_fn": lambda row, ids: [len(ids), 50 + row, new[0]]},
        {},
    ),
    "generation_config": (
        lambda new: {"generation_config": GenerationConfig(repetition_penalty=1.8)},
        {},
    ),
}
SAMPLED = {
    "do_sample": {"do_sample": True},
    "num_return_sequences": {"num_return_sequences": 2},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "top_h": {"top_h": 0.4},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.4},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "renormalize_logits": {"renormalize_logits": True},
}
ELSEWHERE = {
    "bos_token_id": "test_the_bos_token_is_the_prompt_of_those_who_give_none",
    "prefill_chunk_size": "test_the_prompt_is_run_in_chunks",
    "remove_invalid_values": "test_invalid_values_are_removed",
    "return_dict_in_generate": "test_what_is_asked_for_comes_back",
    "output_scores": "test_what_is_asked_for_comes_back",
    "output_logits": "test_what_is_asked_for_comes_back",
    "inputs": "test_the_prompt_may_be_called_inputs",
    "streamer": "test_a_streamer_gets_every_token",
    "tokenizer": "test_a_tokenizer_that_nobody_needs_is_no_error",
}
REFUSED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [1],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "guidance_scale": 2.0,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "use_mtp": True,
    "speculation_type": "dflash",
    "assistant_ensemble_weight": 0.5,
    "is_assistant": True,
    "token_healing": True,
    "use_cache": False,
    "cache_implementation": "offloaded",
    "output_attentions": True,
    "output_hidden_states": True,
    "synced_gpus": True,
    "assistant_tokenizer": words(),
    "custom_generate": lambda **_: None,
    "assistant_model": GenerationConfig(),
}
NO_EFFECT = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "max_matching_ngram_size": 3,
    "decoder_start_token_id": 5,
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 999,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": None,
    "transformers_version": "4.0.0",
    "_from_model_config": True,
    "_commit_hash": "abc",
    "negative_prompt_ids": torch.ones(2, 3, dtype=torch.long),
    "negative_prompt_attention_mask": torch.ones(2, 3, dtype=torch.long),
    "trust_remote_code": True,
}
TABLE = GENERATION_FIELDS | GENERATE_ARGUMENTS


def decided(verdict):
    return {name for name, decision in TABLE.items() if decision.verdict is verdict}


def test_every_field_of_the_installed_transformers_is_decided():
    fields = set(vars(GenerationConfig()))
    assert fields - set(GENERATION_FIELDS) == set(), "decide these in generation_fields.py"
    assert set(GENERATION_FIELDS) - fields <= GONE
    assert options._undecided() == {}
    taken = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert taken - set(GENERATE_ARGUMENTS) == set(), "decide these in generation_fields.py"


def test_every_decision_is_tested():
    assert set(GREEDY) | set(SAMPLED) | set(ELSEWHERE) == decided(Verdict.HONOURED)
    assert set(REFUSED) == decided(Verdict.REFUSED)
    assert set(NO_EFFECT) == decided(Verdict.NO_EFFECT)
    assert all(test in globals() for test in ELSEWHERE.values())
    assert all(decision.reason for decision in TABLE.values())


def test_the_documentation_has_the_same_table():
    text = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")
    for decisions in (GENERATION_FIELDS, GENERATE_ARGUMENTS):
        assert markdown_table(decisions) in text, "put markdown_table() into docs/generate.md"


@pytest.mark.parametrize("name", GREEDY)
def test_an_honoured_option_gives_what_plain_decoding_gives(
    pair, prompt, same, drafting, free, name
):
    plain, patched = pair()
    make, needed = GREEDY[name]
    ids, new = prompt(2, PROMPT), free[0, PROMPT:].tolist()
    base = {"input_ids": ids, "max_new_tokens": NEW, **needed}
    if base.get("eos_token_id") == 2:
        base["eos_token_id"] = new[2]
    if base.pop("one token", False):
        base["input_ids"] = ids[:, :1]
    without = plain.generate(**base, do_sample=False) if needed else free
    out = same(plain, patched, drafting(k=3), **{**base, **make(new)})
    assert out.tolist() != without.tolist(), f"{name} did nothing here"


@pytest.mark.parametrize("name", SAMPLED)
def test_an_honoured_option_shapes_the_law_as_in_plain_decoding(pair, prompt, drafting, name):
    """The scores that tokens are drawn from, at every position of what was drawn."""
    plain, patched = pair("llama", initializer_range=0.2)
    kwargs = {"do_sample": True, "top_k": 0, **SAMPLED[name]}
    pillar = drafting(k=3, s=0.4, seed=3)
    asked = {"return_dict_in_generate": True, "output_scores": True}
    out = patched.generate(prompt(2, PROMPT), max_new_tokens=4, **asked, **kwargs, assistant=pillar)
    assert pillar.stats.accepted < pillar.stats.drafted
    repeats = kwargs.pop("num_return_sequences", 1)
    assert len(out.sequences) == 2 * repeats
    for i in range(4):
        ids = out.sequences[:, : PROMPT + i]
        step = {"max_new_tokens": 1, "attention_mask": torch.ones_like(ids), **asked}
        wanted = plain.generate(ids, **step, **kwargs).scores[0]
        torch.testing.assert_close(out.scores[i], wanted, atol=1e-4, rtol=1e-4)
    if name not in ("do_sample", "num_return_sequences"):
        free = plain.generate(ids, **step, do_sample=True, top_k=0).scores[0]
        assert not torch.allclose(free, wanted), f"{name} did nothing here"
    # The path itself, drawn with the same noise and no drafts.
    again = {**kwargs, "num_return_sequences": repeats}
    path = patched.generate(
        prompt(2, PROMPT), max_new_tokens=4, **again, assistant=drafting(k=0, seed=3)
    )
    assert path.tolist() == out.sequences.tolist()


def test_the_bos_token_is_the_prompt_of_those_who_give_none(pair, same, drafting):
    outputs = [
        same(*pair(), drafting(), bos_token_id=bos, max_new_tokens=NEW).tolist() for bos in (5, 6)
    ]
    assert outputs[0][0][0] == 5 and outputs[0] != outputs[1]


def test_the_prompt_is_run_in_chunks(pair, prompt, same, drafting, forwards):
    with forwards(pair()[1]) as calls:
        for size in (None, 3):
            calls.append(calls[0])
            same(
                *pair(), drafting(), input_ids=prompt(2, PROMPT), max_new_tokens=1,
                prefill_chunk_size=size,
            )  # fmt: skip
    assert (calls[2] - calls[1], calls[0] - calls[2]) == (1, 3)


def test_invalid_values_are_removed(tiny_model, prompt, same, drafting):
    models = tiny_model("llama"), pillarattn.patch(tiny_model("llama"))
    for model in models:
        with torch.no_grad():
            model.lm_head.weight[5] = float("nan")
    kwargs = {"input_ids": prompt(2, PROMPT), "max_new_tokens": NEW}
    broken = models[0].generate(**kwargs, do_sample=False)
    assert (broken[:, PROMPT:] == 5).all()
    out = same(*models, drafting(), remove_invalid_values=True, **kwargs)
    assert len(set(out[0, PROMPT:].tolist())) > 1


def test_what_is_asked_for_comes_back(pair, prompt, drafting):
    plain, patched = pair()
    for asked in ((), ("output_scores",), ("output_logits",)):
        kwargs = {
            "max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3,
            "return_dict_in_generate": True, **dict.fromkeys(asked, True),
        }  # fmt: skip
        wanted = plain.generate(prompt(2, PROMPT), **kwargs)
        got = patched.generate(prompt(2, PROMPT), **kwargs, assistant=drafting())
        assert list(got) == list(wanted)
        assert got.sequences.tolist() == wanted.sequences.tolist()
        for name in asked:
            field = name.removeprefix("output_")
            torch.testing.assert_close(got[field], wanted[field], atol=1e-4, rtol=0)


def test_the_prompt_may_be_called_inputs(pair, prompt, same, drafting):
    same(*pair(), drafting(), inputs=prompt(2, PROMPT), max_new_tokens=NEW)


def test_a_streamer_gets_every_token(pair, prompt, drafting):
    streamers = Keep(), Keep()
    ids, kwargs = prompt(1, PROMPT), {"max_new_tokens": NEW, "do_sample": False}
    pair()[0].generate(ids, **kwargs, streamer=streamers[0])
    pair()[1].generate(ids, **kwargs, streamer=streamers[1], assistant=drafting())
    assert streamers[1].tokens == streamers[0].tokens
    assert len(streamers[0].tokens) == PROMPT + NEW + 1


def test_a_tokenizer_that_nobody_needs_is_no_error(pair, prompt, same, drafting):
    same(*pair(), drafting(), input_ids=prompt(2, PROMPT), max_new_tokens=NEW, tokenizer=words())


@pytest.fixture(scope="module")
def short(pair):
    """Three tokens that plain decoding adds to a prompt of six."""
    ids = torch.randint(1, 97, (1, 6), generator=torch.Generator().manual_seed(1))
    return pair()[0].generate(ids, max_new_tokens=3, do_sample=False).tolist()


@pytest.fixture(scope="module")
def free(pair):
    """The tokens that plain decoding adds to a prompt of eight."""
    ids = torch.randint(1, 97, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    return pair()[0].generate(ids, max_new_tokens=NEW, do_sample=False)


@pytest.fixture
def refuse(pair, prompt, drafting, forwards):
    """Return `refuse(match, **kwargs)`: demand a refusal with no forward pass before it."""

    def check(match, **kwargs):
        model = pair()[1]
        with forwards(model) as calls, pytest.raises(ValueError, match=match) as caught:
            model.generate(prompt(1, 6), **{"max_new_tokens": 4, "assistant": drafting(), **kwargs})
        assert calls == [0]
        return str(caught.value)

    return check


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_option_is_refused_by_name(refuse, name):
    message = refuse(name, **{name: REFUSED[name]})
    assert TABLE[name].reason in message
    assert "without assistant=" in message
    assert f"pass {name}={TABLE[name].harmless[-1]!r}" in message


@pytest.mark.parametrize("name", [n for n in REFUSED if n in GENERATION_FIELDS])
def test_a_refused_option_of_a_config_is_refused_by_name(refuse, name):
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    setattr(config, name, REFUSED[name])
    refuse(name, generation_config=config)


def test_a_refused_option_of_the_models_own_config_is_refused(tiny_model, prompt, drafting):
    plain, model = tiny_model("llama"), pillarattn.patch(tiny_model("llama"))
    model.generation_config.num_beams = 4
    kwargs = {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(UnsupportedOptionError, match="num_beams=4"):
        model.generate(prompt(1, 6), **kwargs, assistant=drafting())
    got = model.generate(prompt(1, 6), **kwargs, num_beams=1, assistant=drafting())
    assert got.equal(plain.generate(prompt(1, 6), **kwargs))


@pytest.mark.parametrize("name", REFUSED)
def test_the_harmless_values_of_a_refused_option_change_nothing(
    pair, prompt, drafting, short, name
):
    for value in TABLE[name].harmless:
        if (name, value) in (("num_beams", None), ("cache_implementation", "dynamic_full")):
            continue  # generate itself has no use for these
        if value == "static":
            continue  # tests/user_cases/test_caches.py
        kwargs = {"max_new_tokens": 3, "do_sample": False, name: value}
        got = pair()[1].generate(prompt(1, 6), **kwargs, assistant=drafting(k=1))
        assert got.tolist() == short


@pytest.mark.parametrize("name", NO_EFFECT)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_option_without_effect_changes_nothing_in_plain_decoding_either(
    pair, prompt, same, drafting, short, name
):
    kwargs = {"max_new_tokens": 3, "input_ids": prompt(1, 6)}
    if name in GENERATE_ARGUMENTS:
        value = NO_EFFECT[name]
        kwargs[name] = value[:1] if isinstance(value, torch.Tensor) else value
    else:
        kwargs["generation_config"] = GenerationConfig(pad_token_id=0)
        setattr(kwargs["generation_config"], name, NO_EFFECT[name])
    assert same(*pair(), drafting(k=1), **kwargs).tolist() == short


def test_a_field_that_nobody_has_decided_is_refused_once_it_is_set(
    pair, prompt, refuse, monkeypatch, drafting
):
    monkeypatch.delitem(GENERATION_FIELDS, "top_h")
    options._undecided.cache_clear()
    try:
        assert options._undecided() == {"top_h": None}
        assert "does not know it" in refuse("top_h=0.5", do_sample=True, top_h=0.5)
        config = GenerationConfig(max_new_tokens=2, pad_token_id=0, do_sample=True, top_h=0.5)
        refuse("top_h=0.5", generation_config=config)
        pair()[1].generate(prompt(1, 6), max_new_tokens=2, assistant=drafting())
    finally:
        options._undecided.cache_clear()


def test_stock_generate_with_custom_generate_goes_by_the_same_table(
    pair, prompt, drafting, forwards
):
    model = pair()[1]
    for name in ("num_beams", "use_cache", "guidance_scale", "output_attentions", "use_mtp"):
        with forwards(model) as calls, pytest.raises(UnsupportedOptionError, match=name):
            type(model).generate(
                model, prompt(1, 6), max_new_tokens=4, custom_generate=drafting(),
                **{name: REFUSED[name]},
            )  # fmt: skip
        assert calls == [0]


def test_a_misspelt_option_raises_as_ever(refuse):
    refuse("max_new_token", max_new_token=3)


def test_healing_first_is_what_token_healing_does(pair, drafting):
    plain, patched = pair()
    names = {"[PAD]": 0, "[BOS]": 96, "f": 4, "fo": 5, "foo": 6}
    names.update({f"w{i}": i for i in range(7, 96)})
    inner = Tokenizer(models.WordLevel(names, unk_token="[PAD]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", bos_token="[BOS]", unk_token="[PAD]"
    )
    prompts = [tokenizer(f"w9 w{i} f", return_tensors="pt").input_ids for i in range(7, 40)]
    ids = next(ids for ids in prompts if patched.heal_tokens(ids, tokenizer)[0, -1] != 4)
    kwargs = {"max_new_tokens": NEW, "do_sample": False}
    wanted = plain.generate(ids, token_healing=True, tokenizer=tokenizer, **kwargs)
    healed = patched.heal_tokens(ids, tokenizer)
    assert patched.generate(healed, **kwargs, assistant=drafting()).tolist() == wanted.tolist()
