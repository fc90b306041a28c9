"""Logits processors see, at every position of a block, what plain decoding would show them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import pillarattn

NEW = 14


class Diary(LogitsProcessor):
    """Reads the whole history: forbids a token seen twice, and moves scores by the newest one."""

    def __call__(self, input_ids, scores):
        ones = torch.ones_like(input_ids, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, ones)
        shift = torch.arange(scores.shape[1]).float().unsqueeze(0) * input_ids[:, -1:].float()
        return scores.masked_fill(counts >= 2, float("-inf")) + torch.sin(shift)


class CountsRows(LogitsProcessor):
    """Needs the whole batch, as a processor with per-row state outside does."""

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == self.rows
        return scores + torch.arange(self.rows).unsqueeze(1) * (input_ids[:, -1:] % 3 == 0)


HISTORY = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[3], [53, 31], [31, 70], *([i] for i in range(60, 90))]},
    "sequence_bias": {"sequence_bias": [[[5], 6.0], [[5, 8], 9.0], [[8, 11], 9.0]]},
    "suppress": {"suppress_tokens": list(range(40, 90))},
    "begin_suppress": {"begin_suppress_tokens": list(range(1, 60))},
    "forced_eos": {"forced_eos_token_id": 9},
    "length_penalty": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 13},
    "encoder_penalty": {"encoder_repetition_penalty": 1.7},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 4.0}},
    "several": {"repetition_penalty": 1.5, "min_new_tokens": 6, "eos_token_id": [9, 11, 14, 60]},
}


@pytest.mark.parametrize("s", [0.8, 1.0])
@pytest.mark.parametrize("name", HISTORY)
def test_built_in_processors(pair, ragged, same, drafting, name, s):
    plain, patched = pair()
    options = HISTORY[name]
    got = same(plain, patched, drafting(s=s), **ragged, max_new_tokens=NEW, **options)
    if name not in ("several", "length_penalty"):
        free = plain.generate(**ragged, max_new_tokens=NEW, do_sample=False)
        assert got.tolist() != free.tolist(), "the processor changed nothing"


@pytest.mark.parametrize("s", [0.8, 1.0])
@pytest.mark.parametrize("make", [Diary, lambda: CountsRows(4)], ids=["history", "rows"])
def test_custom_processors(pair, ragged, same, drafting, make, s):
    same(
        *pair(), drafting(s=s), **ragged, max_new_tokens=NEW,
        fresh=lambda: {"logits_processor": LogitsProcessorList([make()])},
    )  # fmt: skip


def allowed_by_row(batch_id, tokens):
    """Allow another residue class in each row, by the newest token."""
    newest = int(tokens[-1]) if len(tokens) else 0
    return [t for t in range(1, 97) if t % 5 == (newest + batch_id) % 5]


@pytest.mark.parametrize("s", [0.8, 1.0])
def test_prefix_allowed_tokens_by_row(pair, ragged, same, drafting, s):
    out = same(
        *pair(), drafting(s=s), **ragged, max_new_tokens=NEW,
        prefix_allowed_tokens_fn=allowed_by_row,
    )  # fmt: skip
    for row, tokens in enumerate(out.tolist()):
        for before, token in pairwise(tokens[23:]):
            assert token % 5 == (before + row) % 5


def test_prefix_functions_meet_only_prefixes_that_rows_really_have(pair, prompt, same, drafting):
    """A grammar knows no continuation of a text that it does not accept, and HF then raises."""

    def grammar(batch_id, tokens):
        new = tokens[8:].tolist()
        if any(token % 7 != (3 * batch_id + i) % 7 for i, token in enumerate(new)):
            return []
        return [t for t in range(1, 97) if t % 7 == (3 * batch_id + len(new)) % 7]

    pillar = drafting(s=0.8)
    same(
        *pair(), pillar, input_ids=prompt(3, 8), max_new_tokens=NEW,
        prefix_allowed_tokens_fn=grammar,
    )  # fmt: skip
    assert 0 < pillar.stats.accepted < pillar.stats.drafted


WARPERS = {
    "min_p": {"min_p": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5, "top_k": 0},
    "typical_p": {"typical_p": 0.4, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.05, "top_k": 0},
    "eta": {"eta_cutoff": 0.05, "top_k": 0},
    "with_history": {"top_k": 3, "repetition_penalty": 1.4},
}


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("seed", [None, 3])
def test_sampled_tokens_lie_in_plain_support(pair, prompt, drafting, name, seed):
    """Teacher-forced: each token has a finite score under plain decoding of its own prefix."""
    plain, patched = pair(vocab_size=97, initializer_range=0.2)
    ids = prompt(1, 10).repeat(48, 1)
    kwargs = {"do_sample": True, "temperature": 1.5, **WARPERS[name]}
    pillar = drafting(s=0.7, seed=seed)
    out = patched.generate(ids, max_new_tokens=6, assistant=pillar, **kwargs)
    assert 0 < pillar.stats.accepted < pillar.stats.drafted
    for i in range(6):
        step = plain.generate(
            out[:, : 10 + i],
            # Token 0 may be sampled, and generate would take it for padding.
            attention_mask=torch.ones_like(out[:, : 10 + i]), max_new_tokens=1,
            return_dict_in_generate=True, output_scores=True, **kwargs,
        )  # fmt: skip
        scores = step.scores[0].gather(1, out[:, 10 + i : 11 + i])
        assert torch.isfinite(scores).all()
        assert len(set(out[:, 10 + i].tolist())) > 1, "temperature did nothing"
        assert torch.isinf(step.scores[0]).any(), "the warper did nothing"


@pytest.mark.parametrize("name", ["top_k", "min_p", "with_history"])
@pytest.mark.parametrize("s", [0.8, 1.0])
def test_seeded_sampling_takes_the_path_of_seeded_plain_sampling(pair, ragged, drafting, name, s):
    patched = pair()[1]
    kwargs = {**ragged, "do_sample": True, "max_new_tokens": NEW, **WARPERS[name]}
    plain = pillarattn.SelfSpeculativeGenerator(k=0, seed=11)
    wanted = patched.generate(**kwargs, assistant=plain)
    assert plain.stats.drafted == 0
    pillar = drafting(s=s, seed=11)
    assert patched.generate(**kwargs, assistant=pillar).tolist() == wanted.tolist()
    assert pillar.stats.accepted > 0


def test_processors_do_not_write_into_the_logits_that_are_returned(pair, prompt, drafting):
    plain, patched = pair()
    kwargs = {
        "max_new_tokens": 8, "do_sample": False, "repetition_penalty": 1.8,
        "return_dict_in_generate": True, "output_logits": True, "output_scores": True,
    }  # fmt: skip
    wanted = plain.generate(prompt(2, 9), **kwargs)
    got = patched.generate(prompt(2, 9), **kwargs, assistant=drafting())
    for a, b in zip(wanted.logits + wanted.scores, got.logits + got.scores, strict=True):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=0)
