"""Requests: values are checked when they are made, and results say what happened."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from pillarattn.engine.logprobs import TokenLogprob
from pillarattn.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestState,
    SamplingParams,
    joined,
)


class Watched(list):
    """Notes each look at its items."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()

    def __getitem__(self, place):
        self.looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_tokens", 0, ">= 1"),
        ("max_tokens", 2.5, "integer"),
        ("max_tokens", True, "integer"),
        ("temperature", -0.1, "0 <= temperature"),
        ("temperature", float("nan"), "temperature"),
        ("temperature", float("inf"), "temperature"),
        ("temperature", "hot", "number"),
        ("top_k", -1, ">= 0"),
        ("top_p", 0.0, "0 < top_p <= 1"),
        ("top_p", 1.1, "0 < top_p <= 1"),
        ("min_p", -0.5, "0 <= min_p <= 1"),
        ("repetition_penalty", 0, "0 < repetition_penalty"),
        ("presence_penalty", float("inf"), "finite presence_penalty"),
        ("frequency_penalty", None, "finite frequency_penalty"),
        ("seed", -1, ">= 0"),
        ("n", 0, ">= 1"),
        ("stop", ("",), "non-empty"),
        ("stop", 5, "list or a tuple"),
        ("stop_token_ids", ("x",), "integer"),
        ("k", -1, ">= 0"),
        ("s", 0.0, "0 < s <= 1"),
        ("logits_processors", (3,), "callables"),
        ("acceptance", "greedy", "'gumbel', 'rejection', 'block'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    assert allowed in str(caught.value)


def test_greedy_samples_would_be_alike():
    with pytest.raises(ValueError, match="n=2 greedy"):
        SamplingParams(n=2)
    assert SamplingParams(n=2, temperature=0.5).n == 2


def test_lists_and_single_strings_become_tuples():
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert SamplingParams(temperature=0).is_greedy


def test_a_result_carries_the_error_and_the_counts():
    request = Request("a", [1, 2], SamplingParams(), output=[3], drafted=8, accepted=6)
    assert not request.result().finished
    assert request.result([3]).new_token_ids == (3,)
    request.finish(FinishReason.ERROR, KeyError("x"))
    result = request.result()
    assert request.state is RequestState.FINISHED
    assert result.finished and result.finish_reason == "error"
    assert result.error == "KeyError: 'x'"
    assert result.acceptance_rate == 0.75


def test_an_output_copies_no_earlier_token_before_somebody_asks():
    request = Request("a", [1, 2], SamplingParams(logprobs=0))
    request.output, request.logprobs = Watched(range(5)), Watched([TokenLogprob(0, -1.0)] * 5)
    first = request.result([4])
    request.output.append(5)
    second = request.result([5])
    (both,) = joined([first, second])
    assert request.output.looks == request.logprobs.looks == 0
    assert both.token_ids == second.token_ids == (0, 1, 2, 3, 4, 5)
    assert both.new_token_ids == (4, 5) and second.new_token_ids == (5,)
    assert second.token_ids is second.token_ids, "made once"
    assert first.cumulative_logprob == -5.0 and request.logprobs.looks == 1


@pytest.mark.parametrize(
    "again",
    [
        lambda one: one,
        copy.copy,
        copy.deepcopy,
        replace,
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: RequestOutput(**asdict(one)),
    ],
    ids=["itself", "copy", "deepcopy", "replace", "pickle", "asdict"],
)
def test_an_earlier_output_does_not_grow(again):
    request = Request("a", [1, 2], SamplingParams(logprobs=0), output=[3])
    request.logprobs.append(TokenLogprob(3, -0.5))
    kept = request.result([3])
    request.output.append(4)
    request.logprobs.append(TokenLogprob(4, -0.5))
    found = again(kept)
    request.output.append(5)
    assert type(found.token_ids) is type(found.logprobs) is tuple
    assert found.token_ids == (3,) and len(found.logprobs) == 1
    assert found == kept and found != request.result([3])
    assert hash(kept) == hash(replace(kept)) and "token_ids=(3,)" in repr(kept)


def test_an_output_made_by_hand_needs_its_tokens_and_stays_as_it_is():
    output = RequestOutput("a", (1,), (2, 3))
    assert output.token_ids == (2, 3) and output.logprobs is None
    with pytest.raises(FrozenInstanceError):
        output.token_ids = ()
    with pytest.raises(TypeError, match="token_ids"):
        RequestOutput("a", (1,))
