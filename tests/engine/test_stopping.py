"""Ends: at a token, a string or the length, exactly where plain decoding would stop."""

from __future__ import annotations

import pytest

from pillarattn.engine.request import FinishReason, Request, SamplingParams
from pillarattn.engine.stopping import StopCheck


@pytest.mark.parametrize("k", [0, 8])
@pytest.mark.parametrize("place", [0, 1, 2, 5, 13])
def test_nothing_follows_a_stop_token_wherever_it_stands(engine, prompts, alone, k, place):
    wanted = alone(prompts[2], 20)
    end = wanted.index(wanted[place])
    params = SamplingParams(max_tokens=20, stop_token_ids=[wanted[place]])
    (output,) = engine(k=k, s=1.0).generate([prompts[2]], params)
    assert output.token_ids == wanted[: end + 1]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("length", range(1, 12))
def test_the_length_is_exact(engine, prompts, alone, length):
    (output,) = engine(k=8, s=1.0).generate([prompts[2]], SamplingParams(max_tokens=length))
    assert output.token_ids == alone(prompts[2], 20)[:length]


def test_end_tokens_of_the_model_and_a_request_that_ignores_them(engine, models, prompts, alone):
    wanted = alone(prompts[2], 20)
    patched = models()[1]
    patched.generation_config.eos_token_id = [wanted[4], 200]
    try:
        params = [SamplingParams(max_tokens=20, ignore_eos=ignore) for ignore in (False, True)]
        stopped, ignoring = engine().generate([prompts[2]] * 2, params)
    finally:
        patched.generation_config.eos_token_id = None
    assert stopped.token_ids == wanted[: wanted.index(wanted[4]) + 1]
    assert ignoring.token_ids == wanted


def test_stop_strings_end_the_tokens_and_are_cut_off_the_text(engine, prompts, alone, letters):
    wanted = alone(prompts[2], 20)
    text = letters.decode(wanted)
    stop = text[6:9]
    at = text.find(stop)
    (output,) = engine(tokenizer=letters).generate(
        [prompts[2]], SamplingParams(max_tokens=20, stop=stop)
    )
    assert output.token_ids == wanted[: at + 3]
    assert output.text == text[:at]
    assert output.finish_reason == "stop"


def test_text_prompts(engine, letters, alone):
    (output,) = engine(tokenizer=letters).generate("Hello", SamplingParams(max_tokens=5))
    assert output.prompt_token_ids == tuple(letters("Hello")["input_ids"])
    assert output.text == letters.decode(alone(list(output.prompt_token_ids), 5))


class Bytes:
    """Tokens of one byte, so that characters are split between tokens."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("stop", ["é", "né ", "ñ"])
def test_a_stop_string_of_split_characters_is_found_with_its_last_byte(stop):
    check = StopCheck(frozenset(), Bytes())
    request = Request("a", [1], SamplingParams(max_tokens=100, stop=stop))
    data, ends = "il est né là".encode(), []
    for byte in data:
        request.output.append(byte)
        if check(request) is FinishReason.STOP:
            ends.append(len(request.output))
            break
    found = data.find(stop.encode())
    assert ends == ([] if found < 0 else [found + len(stop.encode())])


class Pieces:
    """Tokens of any text: 0 is special, 1 and 2 have none, others one letter; like byte pieces."""

    def decode(self, ids, skip_special_tokens=False):
        special = "" if skip_special_tokens else "<s>"
        return "".join(special if i == 0 else "" if i < 3 else chr(int(i) + 94) for i in ids)


@pytest.mark.parametrize("gap", [[1], [1, 2] * 20, [0], [0, 1] * 30])
@pytest.mark.parametrize("stop", ["ab", "xxabc"])
def test_tokens_without_text_do_not_hide_a_stop_string(gap, stop):
    letters = [ord(c) - 94 for c in "xxabcx"]
    check = StopCheck(frozenset(), Pieces())
    request = Request("a", [1], SamplingParams(max_tokens=1000, stop=stop))
    for letter in letters:
        for token in (*gap, letter):
            request.output.append(token)
            reason = check(request)
            if reason:
                break
        if reason:
            break
    assert reason is FinishReason.STOP
    assert Pieces().decode(request.output, skip_special_tokens=True) == "xxab" + stop[4:]
    request.finish(reason)
    assert check.text(request) == ("xx" if stop == "ab" else "")


def test_a_special_token_may_be_a_stop_string():
    check = StopCheck(frozenset(), Pieces())
    request = Request("a", [1], SamplingParams(max_tokens=9, stop="<s>"), output=[5, 6, 0])
    assert check(request) is FinishReason.STOP
