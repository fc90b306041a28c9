"""Texts without a next token: an error exactly where plain decoding has one, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

import pillarattn
from pillarattn.decoding.history import History
from pillarattn.patch.dead_ends import DeadEnds
from pillarattn.patch.logits import ProcessorRule

ENDS = list(range(5, 25))


class NothingAfter(LogitsProcessor):
    """Forbids every token after an end token; plain decoding never asks there."""

    def __call__(self, input_ids, scores):
        new = input_ids[:, 8:]
        ended = ((new >= ENDS[0]) & (new <= ENDS[-1])).any(dim=1)
        return scores.masked_fill(ended[:, None], float("-inf"))


class RaisesAfter(NothingAfter):
    """The same, with an error."""

    def __call__(self, input_ids, scores):
        if torch.isinf(super().__call__(input_ids, scores)).any():
            raise KeyError("no state for this text")
        return scores


class NothingFrom(LogitsProcessor):
    """Forbids every token from a length on: plain decoding gets there."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        return (
            torch.full_like(scores, float("-inf")) if input_ids.shape[1] >= self.length else scores
        )


class EndsAll(StoppingCriteria):
    """Ends the batch at a length, while some rows have run ahead."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 19)


def test_an_error_is_raised_once_a_row_goes_on_from_its_text():
    history = History(torch.tensor([[1, 2], [1, 2]]), capacity=12, fill=0)
    dead_ends, error = DeadEnds(), KeyError("no state for this text")
    dead_ends.note(1, 4, error)
    history.commit(0, [3, 4, 5, 6])
    history.commit(1, [3, 4])
    for length in (2, 3, 4, 5):
        dead_ends.raise_if_reached(history, length)
    history.commit(1, [5])
    with pytest.raises(KeyError) as caught:
        dead_ends.raise_if_reached(history, 4)
    assert caught.value is error
    dead_ends.forget(1, 4)
    dead_ends.raise_if_reached(history, 4)


def rule_over(history, failing, dead_ends):
    """Return a rule of one processor that fails where `failing(text)` says so, and adds 1."""

    class Fails(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if any(failing(row) for row in input_ids.tolist()):
                raise KeyError("no state for this text")
            return scores + 1

    return ProcessorRule(LogitsProcessorList([Fails()]), dead_ends)


def test_the_error_of_a_draft_does_not_spoil_other_rows():
    """Row 0 drafts an end token, 9; the others' scores are processed all the same."""
    history = History(torch.tensor([[1, 2], [3, 4]]), capacity=12, fill=0)
    history.commit(1, [5])
    for i, drafts in enumerate(([9, 6], [6, 6])):
        history.sketch(i, torch.tensor(drafts))
    rule = rule_over(history, lambda text: 9 in text, DeadEnds())
    logits = torch.randn(2, 3, 7)
    scores = rule(history, history.lengths, logits)
    assert scores[1].equal(logits[1] + 1)
    assert scores[0, 0].equal(logits[0, 0] + 1)
    assert scores[0, 1:].equal(logits[0, 1:])


@pytest.mark.parametrize("collects", [False, True])
def test_the_error_of_a_committed_text_is_raised_at_once_or_kept(collects):
    history = History(torch.tensor([[1, 2], [3, 9]]), capacity=12, fill=0)
    dead_ends = DeadEnds() if collects else None
    rule = rule_over(history, lambda text: 9 in text, dead_ends)
    if not collects:
        with pytest.raises(KeyError):
            rule(history, history.lengths, torch.zeros(2, 1, 7))
        return
    rule(history, history.lengths, torch.zeros(2, 1, 7))
    dead_ends.raise_if_reached(history, 2)
    history.commit(1, [5])
    with pytest.raises(KeyError):
        dead_ends.raise_if_reached(history, 2)


def test_the_next_draft_of_a_text_starts_afresh():
    history = History(torch.tensor([[1, 2]]), capacity=12, fill=0)
    dead_ends = DeadEnds()
    rule = rule_over(history, lambda text: 9 in text, dead_ends)
    for draft in (9, 6):
        history.sketch(0, torch.tensor([draft]))
        rule(history, history.lengths, torch.zeros(1, 2, 7))
    history.commit(0, [6, 5])
    dead_ends.raise_if_reached(history, 3)


@pytest.mark.parametrize("forbids", [NothingAfter, RaisesAfter])
def test_a_draft_past_its_end_never_raises_while_it_samples(pair, prompt, drafting, forbids):
    """Drafts go on past an end token; the sampler must not meet what the processor says there."""
    patched = pair("llama", initializer_range=0.05)[1]
    lengths, drafted_past = set(), 0
    for seed in range(5):
        torch.manual_seed(seed)
        pillar = drafting(k=6, s=1.0)
        out = patched.generate(
            prompt(1, 8), max_new_tokens=14, do_sample=True, eos_token_id=ENDS,
            logits_processor=[forbids()], assistant=pillar,
        )  # fmt: skip
        assert not set(out[0, 8:-1].tolist()) & set(ENDS)
        lengths.add(out.shape[1])
        drafted_past += sum(pillar.stats.drafted_by_position) > out.shape[1] - 9
    assert len(lengths) > 2 and drafted_past


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"k": 0}])
def test_a_dead_end_that_plain_decoding_meets_is_its_error(pair, prompt, drafting, options):
    plain, patched = pair()
    kwargs = {"max_new_tokens": 5, "do_sample": True}
    for length, fails in ((8, True), (12, True), (13, False)):
        for model, assistant in ((plain, {}), (patched, {"assistant": drafting(**options)})):
            call = {**kwargs, **assistant, "logits_processor": [NothingFrom(length)]}
            if fails:
                with pytest.raises((RuntimeError, ValueError)):
                    model.generate(prompt(1, 8), **call)
            else:
                assert model.generate(prompt(1, 8), **call).shape[1] == 13


def test_greedy_decoding_goes_on_as_plain_does(pair, prompt, same, drafting):
    """Plain greedy decoding takes the first of equal scores, whatever they are."""
    for length in (8, 10, 13):
        same(
            *pair(), drafting(), input_ids=prompt(1, 8), max_new_tokens=6,
            logits_processor=[NothingFrom(length)],
        )  # fmt: skip


def test_rows_ahead_of_the_batchs_end_raise_nothing(pair, prompt, drafting):
    """A grammar knows nothing after 20 tokens; a rule of the batch ends all rows before that."""
    plain, patched = pair()

    def grammar(row, ids):
        asked.append(len(ids))
        return [] if len(ids) >= 20 else [t for t in range(1, 97) if t % 3 == (len(ids) + row) % 3]

    def options(**more):
        return {
            "max_new_tokens": 16, "do_sample": False, "stopping_criteria": [EndsAll()],
            "prefix_allowed_tokens_fn": grammar, **more,
        }  # fmt: skip

    for seed in range(3):
        asked = []
        want = plain.generate(prompt(3, 8, seed), **options())
        assert want.shape[1] == 19 and max(asked) == 18
        got = patched.generate(prompt(3, 8, seed), **options(assistant=drafting(k=4, s=0.8)))
        assert got.equal(want)
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn returned no token"):
        patched.generate(
            prompt(3, 8), **options(stopping_criteria=None, assistant=drafting(k=4, s=0.8))
        )


def test_a_model_that_overflows_raises_as_in_plain_sampling(tiny_model, prompt, drafting):
    plain, patched = tiny_model("llama"), pillarattn.patch(tiny_model("llama"))
    kwargs = {"max_new_tokens": 8, "do_sample": True}
    for model in (plain, patched):
        # Token 8 of every text overflows, and no earlier one.
        def overflow(module, args, kwargs, output):
            if output.logits.shape[1] and kwargs["position_ids"].max() >= 9:
                output.logits[:, -1] = float("nan")
            return output

        model.register_forward_hook(overflow, with_kwargs=True)
        extra = {} if model is plain else {"assistant": drafting()}
        with pytest.raises((RuntimeError, ValueError)):
            model.generate(prompt(1, 6), **kwargs, **extra)
