"""Caches and logits handed back by models whose states cannot be cut: an end inside a block."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import pillarattn
from pillarattn.patch.compat import cache_keyword
from tests.architectures import recipes


class StopsAt(StoppingCriteria):
    """Ends every row at a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.fixture(scope="module", params=["bamba", "qwen3_next", "bloom"])
def models(request):
    plain = recipes.build(request.param)
    patched = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pillarattn.patch(patched)
    return plain, patched


def assistant():
    """Return drafts that are accepted in whole blocks."""
    return pillarattn.SelfSpeculativeGenerator(k=5, s=1.0)


def test_a_criterion_inside_a_block_leaves_a_cache_for_the_next_turn(models):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (1, 20), generator=generator)
    more = torch.randint(3, 90, (1, 6), generator=generator)
    turns = []
    for model, extra in zip(models, ({}, {"assistant": assistant()}), strict=True):
        options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, **extra}
        first = model.generate(
            input_ids=ids,
            max_new_tokens=16,
            stopping_criteria=StoppingCriteriaList([StopsAt(28)]),
            **options,
        )
        assert first.sequences.shape[1] == 28
        text = torch.cat([first.sequences, more], dim=1)
        cache = {cache_keyword(): first[cache_keyword()]}
        second = model.generate(input_ids=text, max_new_tokens=10, **options, **cache)
        turns.append((first.sequences.tolist(), second.sequences.tolist()))
    assert turns[0] == turns[1]


def test_rows_that_end_inside_a_block_return_plain_logits(models):
    plain, patched = models
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 90, (3, 20), generator=generator)
    free = plain.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    options = {
        "input_ids": ids,
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": int(free[0, 22]),
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    wanted = plain.generate(**options)
    got = patched.generate(**options, assistant=assistant())
    assert got.sequences.equal(wanted.sequences)
    for mine, its in zip(got.logits, wanted.logits, strict=True):
        assert torch.allclose(mine, its, atol=1e-2, rtol=1e-3)
