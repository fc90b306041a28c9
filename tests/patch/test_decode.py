"""What `generate` returns: tensors, scores and logits of every step and row, several samples."""

from __future__ import annotations

import pytest
import torch
from transformers import set_seed
from transformers.generation import GenerateDecoderOnlyOutput

DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def check_outputs(wanted, got):
    """Compare sequences exactly, and scores and logits of every step and row closely."""
    assert type(got) is type(wanted) is GenerateDecoderOnlyOutput
    assert list(got.keys()) == list(wanted.keys())
    assert got.sequences.tolist() == wanted.sequences.tolist()
    for name in ("scores", "logits"):
        theirs, mine = getattr(wanted, name), getattr(got, name)
        if theirs is None:
            assert mine is None
            continue
        assert type(mine) is type(theirs)
        assert len(mine) == len(theirs)
        for step, (a, b) in enumerate(zip(theirs, mine, strict=True)):
            assert b.shape == a.shape and b.dtype == a.dtype
            torch.testing.assert_close(b, a, atol=1e-4, rtol=0, msg=f"{name} of step {step}")


@pytest.mark.parametrize("s", [0.7, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_scores_and_logits_of_every_step_and_row(pair, ragged, drafting, k, s):
    plain, patched = pair()
    kwargs = {**ragged, "max_new_tokens": 16, "do_sample": False, **DICT}
    wanted = plain.generate(**kwargs)
    check_outputs(wanted, patched.generate(**kwargs, assistant=drafting(k=k, s=s)))


@pytest.mark.parametrize("s", [0.7, 1.0])
def test_scores_of_rows_that_finished_early(pair, ragged, drafting, s):
    plain, patched = pair()
    kwargs = {**ragged, "max_new_tokens": 20, "do_sample": False, "repetition_penalty": 1.2}
    free = plain.generate(**kwargs)[:, 24:]
    ends = [int(free[0, 2]), int(free[1, 9])]
    wanted = plain.generate(**kwargs, **DICT, eos_token_id=ends)
    assert (wanted.sequences[0, 28:] == 0).all() and wanted.sequences.shape[1] > 34
    got = patched.generate(**kwargs, **DICT, eos_token_id=ends, assistant=drafting(s=s))
    check_outputs(wanted, got)


@pytest.mark.parametrize("asked", [(), ("output_scores",), ("output_logits",)])
def test_only_what_was_asked_for_comes_back(pair, prompt, drafting, asked):
    plain, patched = pair()
    kwargs = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    kwargs.update(dict.fromkeys(asked, True))
    wanted = plain.generate(prompt(1, 8), **kwargs)
    check_outputs(wanted, patched.generate(prompt(1, 8), **kwargs, assistant=drafting()))


def test_a_tensor_comes_back_without_return_dict(pair, prompt, drafting):
    plain, patched = pair()
    kwargs = {"max_new_tokens": 6, "do_sample": False, "output_scores": True}
    wanted = plain.generate(prompt(2, 8), **kwargs)
    got = patched.generate(prompt(2, 8), **kwargs, assistant=drafting())
    assert type(got) is type(wanted) is torch.Tensor
    assert (got.dtype, got.device) == (wanted.dtype, wanted.device)
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", [None, 5])
def test_several_samples_of_one_prompt_differ(pair, prompt, drafting, seed):
    patched = pair()[1]
    kwargs = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.5}
    several = patched.generate(
        prompt(2, 8), num_return_sequences=4, assistant=drafting(seed=seed), **kwargs
    )
    assert several.shape == (8, 18)
    assert several[:, :8].tolist() == prompt(2, 8).repeat_interleave(4, dim=0).tolist()
    assert len({tuple(row) for row in several[:4].tolist()}) > 1
    identical = patched.generate(prompt(1, 8).repeat(4, 1), assistant=drafting(seed=seed), **kwargs)
    assert len({tuple(row) for row in identical.tolist()}) > 1


def test_set_seed_reproduces_samples(pair, prompt, drafting):
    def sample(seed):
        set_seed(seed)
        out = pair()[1].generate(
            prompt(2, 8), max_new_tokens=10, do_sample=True, temperature=1.5, assistant=drafting()
        )
        return out.tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_seed_of_its_own_needs_no_global_one(pair, prompt, drafting):
    def sample(seed, noise):
        torch.manual_seed(noise)
        return pair()[1].generate(
            prompt(2, 8), max_new_tokens=10, do_sample=True, assistant=drafting(seed=seed)
        ).tolist()  # fmt: skip

    assert sample(7, 0) == sample(7, 1)
    assert sample(7, 0) != sample(8, 0)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sample(7, 0)
    assert torch.equal(torch.get_rng_state(), before), "a seed of its own draws nothing global"


def test_seeded_noise_is_new_at_every_step_and_row(pair, prompt, drafting):
    """At a temperature that flattens everything, tokens are the noise alone."""
    out = pair()[1].generate(
        prompt(4, 8), max_new_tokens=20, do_sample=True, temperature=1e6, top_k=0,
        assistant=drafting(seed=3),
    )[:, 8:].tolist()  # fmt: skip
    assert all(len(set(row)) > 10 for row in out)
    assert all(len(set(column)) > 1 for column in zip(*out, strict=True))


def test_greedy_decoding_draws_no_random_numbers(pair, prompt, drafting):
    before = torch.get_rng_state()
    pair()[1].generate(prompt(2, 8), max_new_tokens=10, do_sample=False, assistant=drafting())
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_do_not_depend_on_their_neighbours(pair, ragged, drafting):
    plain, patched = pair()
    kwargs = {"max_new_tokens": 24, "do_sample": False}
    pillar = drafting(s=0.8)
    together = patched.generate(**ragged, **kwargs, assistant=pillar)
    rounds = pillar.stats.accepted_per_round
    assert len({tuple(row) for row in rounds}) > 1, "all rows accepted alike: nothing was ragged"
    order = torch.tensor([2, 0, 3, 1])
    permuted = {name: value[order] for name, value in ragged.items()}
    again = patched.generate(**permuted, **kwargs, assistant=drafting(s=0.8))
    assert again.tolist() == together[order].tolist()
    for row in range(4):
        ids = ragged["input_ids"][row][ragged["attention_mask"][row].bool()].unsqueeze(0)
        alone = plain.generate(ids, **kwargs)
        assert together[row, 24:].tolist() == alone[0, ids.shape[1] :].tolist()


def test_statistics_belong_to_one_generation(pair, prompt, drafting):
    patched, pillar = pair()[1], drafting()
    patched.generate(prompt(1, 8), max_new_tokens=12, do_sample=False, assistant=pillar)
    first = pillar.stats
    patched.generate(prompt(1, 8), max_new_tokens=6, do_sample=False, assistant=pillar)
    assert (first.emitted, pillar.stats.emitted) == (11, 5)
    pillar.reset()
    assert pillar.stats.rounds == 0
