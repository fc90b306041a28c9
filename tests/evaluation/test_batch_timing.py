"""Batches are timed without changing their tokens, and each row's tokens are counted to its end."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.evaluation.batch_timing import BatchTimes, row_tokens, timed_batch


def batch():
    ids = torch.randint(1, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("speculative", [False, True])
def test_the_tokens_are_those_of_generate(tiny_model, speculative):
    model, inputs = pillarattn.patch(tiny_model("llama")), batch()
    options = {"max_new_tokens": 9, "do_sample": False}
    if speculative:
        options["assistant"] = pillarattn.SelfSpeculativeGenerator(k=3, s=0.5, min_budget=8)
    sequences, times = timed_batch(model, inputs, end_tokens=frozenset(), **options)
    assert torch.equal(sequences, model.generate(**inputs, **options))
    assert times.new_tokens == (9, 9)
    assert times.decoded_tokens == 16
    assert times.prefill_seconds > 0
    assert times.decode_seconds > 0
    assert times.total_seconds == times.prefill_seconds + times.decode_seconds
    assert not model._forward_hooks


def test_the_hook_goes_also_when_generate_fails(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="max_new_tokens"):
        timed_batch(model, batch(), end_tokens=frozenset(), max_new_tokens=-1)
    assert not model._forward_hooks


def test_rows_end_with_their_first_end_token():
    new = torch.tensor([[5, 2, 2, 2], [5, 6, 7, 8], [2, 0, 0, 0]])
    assert row_tokens(new, frozenset({2})) == (2, 4, 1)
    assert row_tokens(new, frozenset()) == (4, 4, 4)


def test_a_row_without_tokens_adds_none():
    assert BatchTimes(1.0, 2.0, (1, 0, 5)).decoded_tokens == 4
