"""U01 to U03: a row ends where plain decoding ends it, wherever in a block that is."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria

NEW = 16


@pytest.fixture(scope="module")
def free(plain):
    """The 16 tokens that plain decoding gives after a prompt of 12."""
    ids = torch.randint(1, 97, (1, 12), generator=torch.Generator().manual_seed(1))
    return plain.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 12:].tolist()


class EndsAfter(StoppingCriteria):
    """Ends every row that holds a token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 12:] == self.token).any(dim=1)


def test_u01_eos_inside_an_accepted_block(
    plain, patched, draft_model, prompt, free, accepting, block_guard
):
    """Once wrong in stock assisted decoding, and only inside a block, so that it looked random."""
    lengths = []
    for i in (0, 4, 6, 9):
        for eos in (free[i], [free[i], free[(i + 7) % NEW]]):
            kwargs = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos}
            want = plain.generate(prompt(1, 12), **kwargs).tolist()
            if i == 6:
                stock = plain.generate(prompt(1, 12), **kwargs, assistant_model=draft_model)
                assert stock.tolist() == want
            got = patched.generate(prompt(1, 12), **kwargs, assistant=accepting)
            assert got.tolist() == want
            lengths.append(got.shape[1])
    assert len(set(lengths)) > 3
    # Without an EOS, prompt lookup once crashed.
    got = patched.generate(prompt(1, 12), max_new_tokens=NEW, do_sample=False, assistant=accepting)
    assert got[0, 12:].tolist() == free
    block_guard(accepting)


def test_u01_a_criterion_inside_an_accepted_block(
    plain, patched, draft_model, prompt, free, accepting, block_guard
):
    """Stock assisted decoding asks once a block, and runs on to its end."""
    overshot = 0
    for i in (2, 4, 5):
        kwargs = {"max_new_tokens": NEW, "do_sample": False}
        kwargs["stopping_criteria"] = [EndsAfter(free[i])]
        want = plain.generate(prompt(1, 12), **kwargs).tolist()
        stock = plain.generate(prompt(1, 12), **kwargs, assistant_model=draft_model).tolist()
        overshot += len(stock[0]) > len(want[0])
        assert patched.generate(prompt(1, 12), **kwargs, assistant=accepting).tolist() == want
        if i == 5:
            block_guard(accepting)
    assert overshot > 0, "stock is right by now: say so in docs/user-cases.md"


def test_u01_a_stop_string_inside_an_accepted_block(
    plain, patched, draft_model, prompt, free, tokenizer, accepting
):
    """Stock assisted decoding loses the tokenizer on its way to the draft model."""
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer}
    with pytest.raises(ValueError, match="tokenizer"):
        plain.generate(
            prompt(1, 12), **kwargs, stop_strings=[f"w{free[4]}"], assistant_model=draft_model
        )
    for string in (f"w{free[4]}", f"w{free[5]} w{free[6]}"):
        kwargs["stop_strings"] = [string]
        want = plain.generate(prompt(1, 12), **kwargs)
        assert want.shape[1] < 12 + NEW
        assert patched.generate(prompt(1, 12), **kwargs, assistant=accepting).equal(want)


def test_u02_the_limit_falls_inside_a_draft(patched, prompt, free, rejecting):
    for k, s in ((1, 0.7), (32, 1.0)):
        for n in (1, 2, 6):
            pillar = rejecting(k=k, s=s)
            kwargs = {"do_sample": False, "assistant": pillar}
            got = patched.generate(prompt(1, 12), max_new_tokens=n, **kwargs)
            assert got[0, 12:].tolist() == free[:n]
            assert pillar.stats.emitted == n - 1, "the first token comes from the prompt"
            if n == 2:
                again = patched.generate(prompt(1, 12), max_length=12 + n, **kwargs)
                assert again.tolist() == got.tolist()


@pytest.mark.parametrize("minimum", [5, 12])
def test_u03_a_minimum_counts_tokens_not_rounds(
    plain, patched, draft_model, prompt, free, accepting, rejecting, minimum
):
    kwargs = {
        "max_new_tokens": NEW, "do_sample": False, "eos_token_id": free[4],
        "min_new_tokens": minimum,
    }  # fmt: skip
    want = plain.generate(prompt(1, 12), **kwargs).tolist()
    if minimum == 12:
        stock = plain.generate(prompt(1, 12), **kwargs, assistant_model=draft_model)
        assert stock.tolist() == want
    assert free[4] not in want[0][12 : 12 + minimum]
    for pillar in (accepting, rejecting(k=7)):
        assert patched.generate(prompt(1, 12), **kwargs, assistant=pillar).tolist() == want
