"""The server: OpenAI's routes give what the engine gives, and a client that leaves frees it."""

from __future__ import annotations

import asyncio
import json

import pytest

import pillarattn

pytest.importorskip("fastapi", reason="the extra pillarattn[serve] is not installed")
pytest.importorskip("httpx2", reason="httpx2, which the test client needs, is not installed")

from fastapi.testclient import TestClient

from pillarattn.engine.server import create_app
from pillarattn.engine.server.choices import merged

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
PROMPT = "one two three four five six"


def events(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_completion_is_that_of_plain_generate(client, alone):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert choice["text"] == alone(PROMPT, 12)
    assert (choice["finish_reason"], answer["object"]) == ("length", "text_completion")
    size = len(PROMPT)
    assert answer["usage"] == {
        "prompt_tokens": size, "completion_tokens": 12, "total_tokens": size + 12,
    }  # fmt: skip


def test_a_stream_has_the_same_text_in_pieces(client, alone):
    body = {
        "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    *pieces, last = events(client.post("/v1/completions", json=body))
    assert "".join(p["choices"][0]["text"] for p in pieces) == alone(PROMPT, 12)
    assert [p["choices"][0]["finish_reason"] for p in pieces][-1] == "length"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    assert len({p["id"] for p in [*pieces, last]}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_never_shown(client, alone, stream):
    text = alone(PROMPT, 30)
    at = next(i for i in range(4, 25) if "\ufffd" not in text[i : i + 2])
    stop = text[at : at + 2]
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": [stop], "stream": stream}
    response = client.post("/v1/completions", json=body)
    pieces = events(response) if stream else [response.json()]
    assert "".join(p["choices"][0]["text"] for p in pieces) == text[: text.find(stop)]
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


def test_prompts_and_samples_are_choices_in_order(client, engine, parts, alone):
    ids = [parts[2](text)["input_ids"] for text in (PROMPT, "seven")]
    body = {"prompt": ids, "max_tokens": 8, "temperature": 0, "n": 2}
    answer = client.post("/v1/completions", json=body).json()
    wanted = [alone(PROMPT, 8)] * 2 + [alone("seven", 8)] * 2
    assert [c["text"] for c in answer["choices"]] == wanted
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) + 5
    body = {"prompt": PROMPT, "max_tokens": 8, "n": 3, "seed": 5, "temperature": 0.9}
    sampled = [c["text"] for c in client.post("/v1/completions", json=body).json()["choices"]]
    params = pillarattn.SamplingParams(max_tokens=8, n=3, seed=5, temperature=0.9)
    assert sampled == [o.text for o in engine.generate([PROMPT], params)]
    assert len(set(sampled)) == 3
    pieces = events(client.post("/v1/completions", json={**body, "stream": True}))
    texts = ["", "", ""]
    for piece in pieces:
        texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert texts == sampled


def test_fields_of_our_own_reach_the_engine(client, engine):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "k": 0}
    client.post("/v1/completions", json=body)
    assert engine.stats.drafted == 0
    client.post("/v1/completions", json={**body, "k": 2, "s": 1.0, "acceptance": "rejection"})
    assert engine.stats.drafted > 0
    stats = client.get("/health").json()
    assert stats["status"] == "ok" and stats["stats"]["finished"] == {"length": 2}


def test_chat_uses_the_template(client, engine, parts, alone):
    messages = [{"role": "user", "content": "hello there"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 10, "temperature": 0}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
    parts[2].chat_template = TEMPLATE
    try:
        answer = client.post("/v1/chat/completions", json=body).json()
        wanted = alone("<user>hello there<assistant>", 10)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": wanted}
        pieces = events(client.post("/v1/chat/completions", json={**body, "stream": True}))
        # Without a limit it goes on as far as there is room.
        body = {"messages": messages, "stop": wanted[-4:], "temperature": 0}
        full = client.post("/v1/chat/completions", json=body).json()
        broken = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user"}], "max_tokens": 2}
        )
    finally:
        parts[2].chat_template = None
    deltas = [p["choices"][0]["delta"] for p in pieces]
    assert deltas[0]["role"] == "assistant" and all("role" not in d for d in deltas[1:])
    assert "".join(d["content"] for d in deltas) == wanted
    assert pieces[0]["object"] == "chat.completion.chunk"
    assert full["choices"][0]["finish_reason"] == "stop"
    assert broken.status_code in (200, 400)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "other"}, 404, "'other' is not served; this is 'tiny'"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens must be an integer >= 1"),
        ({"max_tokens": 5000}, 400, "the most is 2048 together"),
        ({"prompt": ""}, 400, "empty prompt"),
        ({"prompt": [5, 9999]}, 400, "token 9999"),
        ({"logprobs": 21}, 400, "logprobs: Input should be less than or equal to 20"),
        ({"logprobs": -1}, 400, "logprobs: Input should be greater than or equal to 0"),
        ({"tools": []}, 400, "tools: Extra inputs"),
        ({"n": 0}, 400, "n: "),
        ({"draft_length": "longest"}, 400, "'longest'"),
        ({"stop": [""]}, 400, "stop must hold non-empty"),
        ({"stop": "x" * 1025}, 400, "stop: String should have at most 1024 characters"),
        ({"stop": ["x"] * 65}, 400, "List should have at most 64 items"),
        ({"stop_token_ids": [1] * 1025}, 400, "stop_token_ids: List should have at most 1024"),
        ({"prompt": []}, 400, "prompt: 0 prompts of n=1 samples are 0 choices; 1..1024"),
        ({"prompt": ["a"] * 3, "n": 1000}, 400, "are 3000 choices; 1..1024"),
        ({"prompt": 5}, 400, "prompt: Input should be a valid string, or Input should be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_in_one_line(client, engine, change, status, message, stream):
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": stream, **change}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
    assert not engine.has_unfinished


def test_null_means_left_out(client, alone):
    body = {
        "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": None, "stop": None,
        "suffix": None, "seed": None,
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == alone(PROMPT, 4)


def test_models(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"


async def call(app, body, *, leave_after):
    """Send a request, and go away after `leave_after` pieces of the answer; None: never."""
    sent, left = [], asyncio.Event()
    data = json.dumps(body).encode()
    inbox = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive():
        if inbox:
            return inbox.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if leave_after is not None and len(sent) > leave_after:
            left.set()

    if leave_after == 0:
        asyncio.get_running_loop().call_later(0.05, left.set)
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query_string": b"", "root_path": "", "scheme": "http", "server": ("test", 80),
        "client": ("test", 1), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 60)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests_alone(engine, alone, stream):
    app = create_app(engine, "tiny")
    body = {"prompt": PROMPT, "max_tokens": 400, "n": 2, "temperature": 1.0, "stream": stream}
    stays = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}

    async def scene():
        return await asyncio.gather(
            call(app, body, leave_after=2 if stream else 0), call(app, stays, leave_after=None)
        )

    _, kept = asyncio.run(scene())
    answer = json.loads(b"".join(m.get("body", b"") for m in kept))
    assert answer["choices"][0]["text"] == alone(PROMPT, 30)
    while engine.has_unfinished:
        engine.step()
    assert engine.stats.finished == {"abort": 2, "length": 1}
    assert engine.scheduler.pool.used == 0
    assert not engine._streams._waiting


def test_many_clients_share_the_steps(engine, alone):
    app = create_app(engine, "tiny")
    bodies = [{"prompt": PROMPT[i:], "max_tokens": 16, "temperature": 0} for i in range(6)]

    async def scene():
        return await asyncio.gather(*(call(app, body, leave_after=None) for body in bodies))

    for i, sent in enumerate(asyncio.run(scene())):
        answer = json.loads(b"".join(m.get("body", b"") for m in sent))
        assert answer["choices"][0]["text"] == alone(PROMPT[i:], 16)
    # One after the other each draft and each verify pass would be a step.
    assert engine.stats.steps < (engine.stats.draft_rows + engine.stats.rounds) / 3


def test_a_server_needs_a_tokenizer(parts):
    with pytest.raises(ValueError, match="tokenizer"):
        create_app(pillarattn.Engine(parts[1], pillarattn.EngineConfig(preflight=False)), "tiny")


def test_a_request_that_fails_is_an_error(client, engine):
    original = engine._intake._decoder

    def broken(request):
        decoder = original(request)
        decoder.judge = None
        return decoder

    engine._intake._decoder = broken
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 500 and "TypeError" in response.json()["error"]["message"]
    text = client.post("/v1/completions", json={**body, "stream": True}).text
    assert "TypeError" in text and "[DONE]" not in text


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", b'{"prompt": "\\ud800"}', "prompt: "),
        ("completions", b'{"prompt": ', "not valid JSON at character 11: Expecting value"),
        ("completions", b"[]", "body: Input should be a valid dictionary"),
        ("completions", b"", "body: Field required"),
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "messages: ",
        ),
    ],
)
def test_what_is_no_text_is_refused(client, engine, parts, path, body, message):
    parts[2].chat_template = TEMPLATE
    try:
        headers = {"content-type": "application/json"}
        response = client.post(f"/v1/{path}", content=body, headers=headers)
    finally:
        parts[2].chat_template = None
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert not engine.has_unfinished


def test_parts_of_text_are_text_and_others_refused(client, parts, alone):
    """A template that expects a string would else write out the list."""
    ask = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": ask}], "max_tokens": 4, "temperature": 0}
    parts[2].chat_template = TEMPLATE
    try:
        answer = client.post("/v1/chat/completions", json=body).json()
        ask[1] = {"type": "image_url", "image_url": {"url": "x"}}
        refused = client.post("/v1/chat/completions", json=body)
    finally:
        parts[2].chat_template = None
    assert answer["choices"][0]["message"]["content"] == alone("<user>one\ntwo<assistant>", 4)
    assert refused.status_code == 400
    assert "must have the type 'text', got 'image_url'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_of_no_tokens_is_refused_and_not_endless(client, parts, name):
    body = {"messages": [{"role": "user", "content": "hi"}], name: 0}
    parts[2].chat_template = TEMPLATE
    try:
        response = client.post("/v1/chat/completions", json=body)
    finally:
        parts[2].chat_template = None
    assert response.status_code == 400
    assert "max_tokens must be an integer >= 1, got 0" in response.json()["error"]["message"]


def test_a_client_that_leaves_before_its_first_token_is_dropped_from_the_queue(parts):
    """While another one holds the only place, it would wait for a token that nobody reads."""
    config = pillarattn.EngineConfig(
        kv_tokens=2048, max_batch=1, seed=0, preflight=False, pillar=pillarattn.PillarConfig(k=0)
    )
    engine = pillarattn.Engine(parts[1], config, tokenizer=parts[2])
    app = create_app(engine, "tiny")
    engine.add_request(PROMPT, pillarattn.SamplingParams(max_tokens=500, ignore_eos=True))
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
    asyncio.run(call(app, body, leave_after=0))
    # The step that another thread ran has ended, and with it the request.
    assert list(engine.requests) == ["request-0"]
    assert engine.stats.finished == {"abort": 1}
    engine.abort_all()


def test_a_step_that_fails_in_a_stream_is_told_to_its_client(engine):
    app = create_app(engine, "tiny")
    original, sent = engine.runner.run, []

    def sometimes(segments, ahead=None):
        if engine.stats.steps >= 3:
            raise MemoryError("out of memory")
        return original(segments, ahead)

    engine.runner.run = sometimes
    body = {"prompt": PROMPT, "max_tokens": 40, "stream": True, "k": 0, "temperature": 0}
    with TestClient(app, raise_server_exceptions=False) as client:
        sent = client.post("/v1/completions", json=body).text.strip().split("\n\n")
    assert (
        "MemoryError: out of memory"
        in json.loads(sent[-1].removeprefix("data: "))["error"]["message"]
    )
    assert not engine.has_unfinished


def test_who_reads_slowly_gets_the_newest_output_of_each_stream():
    """What it has not read would else grow with the square of the tokens."""

    async def numbers(count):
        for i in range(count):
            await asyncio.sleep(0)
            yield i

    async def scene():
        seen = []
        async for item in merged([numbers(1000), numbers(10)]):
            seen.append(item)
            if len(seen) == 1:
                for _ in range(3000):
                    await asyncio.sleep(0)
        return seen

    seen = asyncio.run(scene())
    assert seen[-2:] == [(0, 999), (1, 9)] or seen[-2:] == [(1, 9), (0, 999)]
    assert len(seen) <= 5
