"""Every row ends exactly where plain decoding ends it, wherever in a block that is."""

from __future__ import annotations

import time

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

NEW = 24


@pytest.fixture(scope="module")
def tokenizer():
    """One word a token: "w1" to "w96"; StopStringCriteria wants to tokenize "abcdef"."""
    words = {"abcdef": 0, **{f"w{i}": i for i in range(1, 97)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="abcdef"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="abcdef", unk_token="abcdef")


@pytest.fixture
def greedy(pair, prompt):
    """The 24 tokens that plain greedy decoding gives after a prompt of 12."""
    ids = prompt(1, 12)
    return pair()[0].generate(ids, max_new_tokens=NEW, do_sample=False)[0, 12:].tolist()


def first(tokens, wanted):
    """Return how many tokens come out if the first of `wanted` ends the output."""
    return min([i + 1 for i, token in enumerate(tokens) if token in wanted], default=len(tokens))


@pytest.mark.parametrize("position", range(NEW))
def test_eos_at_every_position_of_a_block(
    pair, prompt, greedy, all_accepted, most_in_a_round, position
):
    eos = greedy[position]
    out = pair()[1].generate(
        prompt(1, 12), max_new_tokens=NEW, do_sample=False, eos_token_id=eos, assistant=all_accepted
    )
    new = out[0, 12:].tolist()
    assert new == greedy[: first(greedy, [eos])]
    if len(new) > 4:
        assert most_in_a_round(all_accepted) >= 3
    assert all_accepted.stats.emitted == len(new) - 1


@pytest.mark.parametrize("position", [0, 5, 11, 17])
def test_a_list_of_eos_tokens(pair, prompt, greedy, drafting, position):
    eos = [greedy[position], greedy[(position + 7) % NEW]]
    for s in (0.7, 1.0):
        out = pair()[1].generate(
            prompt(1, 12), max_new_tokens=NEW, do_sample=False, eos_token_id=eos,
            assistant=drafting(k=7, s=s),
        )  # fmt: skip
        assert out[0, 12:].tolist() == greedy[: first(greedy, eos)]


def test_without_an_eos_token_it_runs_to_the_limit(pair, prompt, greedy, all_accepted):
    out = pair()[1].generate(
        prompt(1, 12), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        assistant=all_accepted,
    )  # fmt: skip
    assert out[0, 12:].tolist() == greedy


@pytest.mark.parametrize(("k", "s"), [(1, 0.7), (4, 0.7), (4, 1.0), (7, 1.0), (32, 1.0)])
def test_max_new_tokens_in_mid_block(pair, prompt, greedy, drafting, forwards, k, s):
    model, ids = pair()[1], prompt(1, 12)
    for n in [*range(1, min(2 * k + 3, 11)), 16]:
        pillar = drafting(k=k, s=s)
        with forwards(model) as calls:
            out = model.generate(ids, max_new_tokens=n, do_sample=False, assistant=pillar)
        assert out[0, 12:].tolist() == greedy[:n]
        assert pillar.stats.emitted == n - 1
        if n == 1:
            assert calls == [1]
        by_length = model.generate(ids, max_length=12 + n, do_sample=False, assistant=pillar)
        assert by_length.tolist() == out.tolist()


@pytest.mark.parametrize("minimum", [5, 6, 9, 20])
@pytest.mark.parametrize("s", [0.7, 1.0])
@pytest.mark.parametrize("name", ["min_new_tokens", "min_length"])
def test_a_minimum_counts_tokens_not_rounds(pair, prompt, same, greedy, drafting, minimum, s, name):
    least = minimum if name == "min_new_tokens" else minimum + 12
    out = same(
        *pair(), drafting(k=7, s=s), input_ids=prompt(1, 12), max_new_tokens=NEW,
        eos_token_id=greedy[4], **{name: least},
    )  # fmt: skip
    new = out[0, 12:].tolist()
    assert greedy[4] not in new[:minimum]


def test_rows_of_a_batch_end_apart(pair, ragged, same, drafting):
    plain = pair()[0]
    free = plain.generate(**ragged, max_new_tokens=20, do_sample=False)[:, 24:]
    ends = [int(free[0, 2]), int(free[1, 9]), int(free[2, 15])]
    for s in (0.7, 1.0):
        out = same(*pair(), drafting(s=s), **ragged, max_new_tokens=20, eos_token_id=ends)
        assert (out[0, 24 + 3 :] == 0).all()
        assert out.shape[1] > 24 + 10


class RowContains(StoppingCriteria):
    """Ends a row that holds a token divisible by `divisor` among its new ones."""

    def __init__(self, divisor, start):
        self.divisor, self.start, self.asked = divisor, start, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.shape[1])
        new = input_ids[:, self.start + 3 :]
        return (new % self.divisor == 0).any(dim=1)


class SumOverBatch(StoppingCriteria):
    """Ends all rows at once when the newest tokens of the whole batch add up to a multiple."""

    def __call__(self, input_ids, scores, **kwargs):
        total = int(input_ids[:, -1].sum())
        return torch.full((input_ids.shape[0],), total % 11 == 0)


class ConfidentEnough(StoppingCriteria):
    """Ends a row whose newest score is high, and keeps what it was handed."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.shape[1], len(scores)))
        return scores[-1].softmax(-1).amax(-1) > 0.97


@pytest.mark.parametrize("s", [0.7, 1.0])
@pytest.mark.parametrize("eos", [None, 5])
@pytest.mark.parametrize(
    "criterion", [lambda: RowContains(13, 24), SumOverBatch], ids=["row", "batch"]
)
def test_custom_criteria(pair, ragged, drafting, eos, criterion, s):
    plain, patched = pair()
    kwargs = {**ragged, "max_new_tokens": 24, "do_sample": False, "eos_token_id": eos}
    wanted = plain.generate(**kwargs, stopping_criteria=[criterion()])
    pillar = drafting(s=s)
    mine = criterion()
    got = patched.generate(**kwargs, stopping_criteria=[mine], assistant=pillar)
    assert wanted.shape[1] < 48, "the criterion never fired"
    assert got.tolist() == wanted.tolist()
    if isinstance(mine, RowContains):
        assert mine.asked == list(range(25, wanted.shape[1] + 1)), "asked once a length, in order"
    assert min(min(row, default=0) for row in pillar.stats.accepted_per_round) >= 0
    if eos is None:
        # Each row's first token comes from the prompt.
        assert pillar.stats.emitted <= 4 * (wanted.shape[1] - 25)


def test_a_criterion_may_stop_a_row_behind_its_front(pair, prompt, drafting):
    """One row runs ahead while another lags; the batch criterion then ends both far back."""

    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 17, input_ids.shape[1] >= 30])

    plain, patched = pair()
    ids = prompt(2, 12)
    for eos in (None, 96):
        kwargs = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": eos}
        wanted = plain.generate(ids, **kwargs, stopping_criteria=[StopAt()])
        pillar = drafting(k=6, s=0.8)
        got = patched.generate(ids, **kwargs, stopping_criteria=[StopAt()], assistant=pillar)
        assert got.tolist() == wanted.tolist()
        assert min(map(min, pillar.stats.accepted_per_round)) >= 0


def test_criteria_that_read_scores(pair, ragged, drafting):
    plain, patched = pair()
    kwargs = {
        **ragged, "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True,
        "output_scores": True,
    }  # fmt: skip
    theirs, mine = ConfidentEnough(), ConfidentEnough()
    wanted = plain.generate(**kwargs, stopping_criteria=[theirs])
    got = patched.generate(**kwargs, stopping_criteria=[mine], assistant=drafting())
    assert got.sequences.tolist() == wanted.sequences.tolist()
    assert mine.seen == theirs.seen


@pytest.mark.parametrize("s", [0.7, 1.0])
def test_stop_strings_across_and_inside_tokens(pair, prompt, greedy, drafting, tokenizer, s):
    plain, patched = pair()
    text = tokenizer.decode(greedy).split()
    for string in (text[6], " ".join(text[8:10]), text[11][1:] + " " + text[12][:2]):
        kwargs = {
            "max_new_tokens": NEW, "do_sample": False, "stop_strings": [string],
            "tokenizer": tokenizer,
        }  # fmt: skip
        wanted = plain.generate(prompt(1, 12), **kwargs)
        assert wanted.shape[1] < 12 + NEW
        got = patched.generate(prompt(1, 12), **kwargs, assistant=drafting(k=7, s=s))
        assert got.tolist() == wanted.tolist()


def test_stop_strings_in_a_batch_and_from_a_config(pair, ragged, drafting, tokenizer):
    plain, patched = pair()
    free = plain.generate(**ragged, max_new_tokens=16, do_sample=False)
    strings = [f"w{int(free[0, 27])}", f"w{int(free[2, 35])}"]
    config = type(plain.generation_config)(
        max_new_tokens=16, do_sample=False, stop_strings=strings, pad_token_id=0
    )
    wanted = plain.generate(**ragged, generation_config=config, tokenizer=tokenizer)
    before = config.to_dict()
    got = patched.generate(
        **ragged, generation_config=config, tokenizer=tokenizer, assistant=drafting()
    )
    assert got.tolist() == wanted.tolist()
    assert config.to_dict() == before, "the caller's config is not ours to change"
    positional = patched.generate(
        ragged["input_ids"], config, attention_mask=ragged["attention_mask"],
        tokenizer=tokenizer, assistant=drafting(),
    )  # fmt: skip
    assert positional.tolist() == wanted.tolist()


def test_stop_strings_without_a_tokenizer_raise_as_ever(pair, prompt, drafting, forwards):
    with forwards(pair()[1]) as calls, pytest.raises(ValueError, match="tokenizer"):
        pair()[1].generate(
            prompt(1, 5), max_new_tokens=4, stop_strings=["w1"], assistant=drafting()
        )
    assert calls == [0]


def test_max_time_ends_early_with_a_prefix_of_the_output(pair, prompt, drafting):
    plain, patched = pair()
    ids = prompt(1, 12)
    wanted = plain.generate(ids, max_new_tokens=100, do_sample=False)[0].tolist()
    begun = time.monotonic()
    out = patched.generate(
        ids, max_new_tokens=100, do_sample=False, max_time=0.1, assistant=drafting()
    )[0].tolist()
    assert time.monotonic() - begun < 5
    assert 12 < len(out) < 112
    assert out == wanted[: len(out)]


def test_a_criteria_list_object_is_taken_and_left_alone(pair, prompt, drafting, tokenizer):
    criteria = StoppingCriteriaList([RowContains(5, 12)])
    pair()[1].generate(
        prompt(1, 12), max_new_tokens=8, do_sample=False, stop_strings=["w3"],
        tokenizer=tokenizer, stopping_criteria=criteria, assistant=drafting(),
    )  # fmt: skip
    assert len(criteria) == 1
