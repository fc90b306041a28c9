"""Requests: values are checked when they are made, and results say what happened."""

from __future__ import annotations

import pytest

from pillarattn.engine.request import FinishReason, Request, RequestState, SamplingParams


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
