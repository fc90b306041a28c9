"""Log probabilities of an answer: those of the engine, in OpenAI's words, whole or in pieces."""

from __future__ import annotations

import json
import math

import pytest
import torch

import pillarattn

pytest.importorskip("fastapi", reason="the extra pillarattn[serve] is not installed")

from pillarattn.engine.logprobs import TokenLogprob
from pillarattn.engine.request import RequestOutput
from pillarattn.engine.server.logprob_pieces import LogprobPieces
from tests.engine.server.test_app import PROMPT, TEMPLATE, events

NEW = 12
BODY = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
CHAT = {
    "messages": [{"role": "user", "content": "hello"}], "max_tokens": NEW, "temperature": 0,
    "logprobs": True,
}  # fmt: skip


@pytest.fixture
def chats(parts):
    """The tokenizer has a chat template meanwhile."""
    parts[2].chat_template = TEMPLATE
    yield
    parts[2].chat_template = None


def assert_alike(found, wanted):
    """Numbers may round otherwise in other batches; all else is equal."""
    assert type(found) is type(wanted)
    if isinstance(found, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(found, list):
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(wanted, abs=1e-4) if isinstance(found, float) else wanted)


def by_the_model(parts, new):
    """Return the log probabilities of all tokens at each new place, `[new, V]`."""
    plain, _, tokenizer = parts
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    out = plain.generate(ids, max_new_tokens=new, do_sample=False)
    with torch.no_grad():
        found = plain(out).logits[0, ids.shape[1] - 1 : -1].float().log_softmax(-1)
    return out[0, ids.shape[1] :].tolist(), found


def test_a_completion_has_those_of_the_model(client, parts):
    tokens, wanted = by_the_model(parts, NEW)
    (choice,) = client.post("/v1/completions", json={**BODY, "logprobs": 3}).json()["choices"]
    found = choice["logprobs"]
    own = [float(line[token]) for line, token in zip(wanted, tokens, strict=True)]
    assert found["token_logprobs"] == pytest.approx(own, abs=1e-4)
    assert found["tokens"] == [parts[2].decode([token]) for token in tokens]
    for line, text, top in zip(wanted, found["tokens"], found["top_logprobs"], strict=True):
        assert top[text] == pytest.approx(float(line.max()), abs=1e-4)
        assert 1 <= len(top) <= 3
    assert found["text_offset"] == list(range(NEW))


def test_without_others_each_has_the_emitted_token_alone(client):
    (choice,) = client.post("/v1/completions", json={**BODY, "logprobs": 0}).json()["choices"]
    found = choice["logprobs"]
    pairs = zip(found["tokens"], found["token_logprobs"], strict=True)
    assert found["top_logprobs"] == [{text: value} for text, value in pairs]


def test_they_are_not_there_unless_they_are_wanted(client):
    (choice,) = client.post("/v1/completions", json=BODY).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("n", [1, 2])
def test_pieces_together_are_the_whole(client, n):
    body = {**BODY, "logprobs": 2, "n": n}
    whole = client.post("/v1/completions", json=body).json()["choices"]
    found = [{name: [] for name in whole[0]["logprobs"]} for _ in range(n)]
    for event in events(client.post("/v1/completions", json={**body, "stream": True})):
        (choice,) = event["choices"]
        for name, values in choice["logprobs"].items():
            found[choice["index"]][name] += values
    assert_alike(found, [choice["logprobs"] for choice in whole])


def test_a_message_names_the_likeliest(client, chats):
    body = {**CHAT, "top_logprobs": 4}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == NEW
    for one in content:
        assert len(one["top_logprobs"]) == 4
        assert one["top_logprobs"][0]["logprob"] == pytest.approx(one["logprob"])
        assert all(math.exp(top["logprob"]) <= 1 for top in one["top_logprobs"])
        for top in (one, *one["top_logprobs"]):
            known = "\ufffd" not in top["token"]
            assert top["bytes"] == (list(top["token"].encode()) if known else None)
    pieces = events(client.post("/v1/chat/completions", json={**body, "stream": True}))
    parts = [piece["choices"][0]["logprobs"]["content"] for piece in pieces]
    assert_alike([one for part in parts for one in part], content)


def test_a_message_may_name_no_others(client, chats):
    (choice,) = client.post("/v1/chat/completions", json=CHAT).json()["choices"]
    assert all(one["top_logprobs"] == [] for one in choice["logprobs"]["content"])
    (choice,) = client.post("/v1/chat/completions", json={**CHAT, "logprobs": False}).json()[
        "choices"
    ]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
        ({"top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20"),
        ({"logprobs": 7}, "logprobs: Input should be a valid boolean"),
    ],
)
def test_what_is_wrong_is_said(client, chats, change, message):
    response = client.post("/v1/chat/completions", json={**CHAT, **change})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


WORDS = {1: " one", 2: " two", 3: ",", 9: "</s>"}


class Pieces:
    """A tokenizer whose first token of a text loses its space, and whose 7 and 8 are one letter."""

    def decode(self, ids, skip_special_tokens=False):
        text, at = "", 0
        while at < len(ids):
            if ids[at : at + 2] == [7, 8]:
                text, at = text + "é", at + 2
                continue
            text, at = text + WORDS.get(ids[at], "\ufffd"), at + 1
        return text.removeprefix(" ")


def output_of(tokens, top=()):
    named = tuple(TokenLogprob(token, -0.5, tuple(top)) for token in tokens)
    return RequestOutput("0", (1,), tuple(tokens), logprobs=named)


def test_the_text_of_a_token_is_what_it_adds():
    """Spaces stay with their words, and offsets are those of the whole text."""
    pieces = LogprobPieces(Pieces(), is_chat=False)
    found = pieces.take(output_of([1, 2, 3, 2, 9], top=[(1, -0.1), (3, -0.9)]))
    assert found["tokens"] == ["one", " two", ",", " two", "</s>"]
    assert found["text_offset"] == [0, 3, 7, 8, 12]
    assert found["top_logprobs"][1] == {" one": -0.1, ",": -0.9, " two": -0.5}
    assert pieces.take(output_of([1, 2, 3, 2, 9, 1]))["text_offset"] == [16]


def test_parts_of_a_character_have_no_bytes():
    found = LogprobPieces(Pieces(), is_chat=True).take(output_of([1, 7, 8, 2]))
    assert [one["token"] for one in found["content"]] == ["one", "\ufffd", "\ufffd", " two"]
    assert [one["bytes"] for one in found["content"]] == [
        [111, 110, 101], None, None, [32, 116, 119, 111],
    ]  # fmt: skip


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_cannot_be_is_a_number_too(is_chat):
    """JSON has no infinity."""
    taken = LogprobPieces(Pieces(), is_chat=is_chat).take(output_of([2], top=[(3, -math.inf)]))
    assert "Infinity" not in json.dumps(taken)
    assert "-9999.0" in json.dumps(taken)


def test_tokens_of_one_text_are_named_once():
    """By the likeliest of them; the emitted token's own value stands in any case."""
    found = LogprobPieces(Pieces(), is_chat=False).take(
        output_of([2], top=[(7, -0.2), (8, -0.7), (3, -0.9)])
    )
    assert found["top_logprobs"] == [{"\ufffd": -0.2, ",": -0.9, "two": -0.5}]


def test_the_engines_own_are_the_same(client, engine):
    (output,) = engine.generate([PROMPT], pillarattn.SamplingParams(max_tokens=NEW, logprobs=1))
    (choice,) = client.post("/v1/completions", json={**BODY, "logprobs": 1}).json()["choices"]
    assert_alike(choice["logprobs"]["token_logprobs"], [one.logprob for one in output.logprobs])
