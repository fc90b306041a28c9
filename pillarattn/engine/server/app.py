"""The web application: OpenAI's routes over one engine, whose requests share its steps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pillarattn.engine.engine import Engine
from pillarattn.engine.prompts import token_ids
from pillarattn.engine.request import RequestOutput, SamplingParams
from pillarattn.engine.server.choices import Answer, merged
from pillarattn.engine.server.logprob_pieces import LogprobPieces
from pillarattn.engine.server.protocol import Body, ChatBody, CompletionBody
from pillarattn.engine.text_deltas import TextDeltas

# Nobody reads an answer whose client has gone; the number is nginx's.
CLIENT_CLOSED = 499
# Samples of all prompts of one request; each is a request of the engine.
MAX_CHOICES = 1024


class _Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(engine: Engine, model_name: str) -> FastAPI:
    """Return an ASGI application that serves `engine` under `model_name`.

    Routes: /v1/completions, /v1/chat/completions (if the tokenizer has a chat template),
    /v1/models and /health. A client that goes away aborts its requests.

    Raises:
        ValueError: the engine has no tokenizer.
    """
    if engine.tokenizer is None:
        raise ValueError("a server answers in text; pass Engine(..., tokenizer=)")
    app = FastAPI(title="pillarattn", docs_url="/docs", redoc_url=None)
    service = _Service(engine, model_name)
    started = int(time.time())

    @app.exception_handler(_Refused)
    async def refused(request: Request, error: _Refused) -> JSONResponse:
        return _error(error.status, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _error(400, _invalid(error.errors()))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "unfinished": len(engine.requests), "stats": engine.stats.to_dict()}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": model_name, "object": "model", "created": started, "owned_by": "pillarattn"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.complete(body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await service.chat(body, request)

    return app


class _Service:
    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine, self.model_name = engine, model_name

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Answer a request of plain text."""
        count = len(body.prompts) * body.n
        if not 1 <= count <= MAX_CHOICES:
            raise _Refused(
                400, f"prompt: {len(body.prompts)} prompts of n={body.n} samples are {count} "
                f"choices; 1..{MAX_CHOICES} are allowed in one request",
            )  # fmt: skip
        try:
            prompts = [token_ids(prompt, self.engine.tokenizer) for prompt in body.prompts]
        except (TypeError, ValueError) as error:
            # Half of a surrogate pair is valid JSON and no text.
            raise _Refused(400, f"prompt: {error}") from None
        return await self._answer(body, prompts, body.max_tokens, request)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        tokenizer = self.engine.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise _Refused(400, "the tokenizer has no chat template; use /v1/completions")
        try:
            text = tokenizer.apply_chat_template(
                body.texts(), tokenize=False, add_generation_prompt=True
            )
            # The template has written the special tokens already.
            ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        except Exception as error:
            # Templates are programs of the model's authors, and raise what they like.
            raise _Refused(400, f"messages: {type(error).__name__}: {error}") from None
        wanted = body.max_completion_tokens
        if wanted is None:
            wanted = body.max_tokens
        if wanted is None:
            wanted = max(1, self.engine.room_after(len(ids)))
        return await self._answer(body, [ids], wanted, request)

    async def _answer(
        self, body: Body, prompts: list[list[int]], max_tokens: int, request: Request
    ) -> Response:
        if body.model not in (None, self.model_name):
            raise _Refused(404, f"model {body.model!r} is not served; this is {self.model_name!r}")
        try:
            wanted = [
                (prompt, body.sampling(sample, max_tokens))
                for prompt in prompts
                for sample in range(body.n)
            ]
        except ValueError as error:
            raise _Refused(400, str(error)) from None
        answer = Answer(self.model_name, isinstance(body, ChatBody))
        streams = [
            self.engine.stream(prompt, params, priority=body.priority) for prompt, params in wanted
        ]
        outputs = merged(streams)
        if not body.stream:
            return await self._whole(answer, outputs, len(streams), len(prompts), request)

        async def begin() -> tuple[int, RequestOutput]:
            return await anext(outputs)

        # What is wrong with a request is known by then, while there is still a status to send.
        first = await _unless_gone(begin(), request)
        params = [params for _, params in wanted]
        events = self._events(body, answer, params, first, outputs, len(prompts), request)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _whole(
        self, answer: Answer, outputs: Any, count: int, prompts: int, request: Request
    ) -> Response:
        async def collect() -> list[RequestOutput]:
            last: dict[int, RequestOutput] = {}
            async with aclosing(outputs):
                async for index, output in outputs:
                    last[index] = output
            return [last[index] for index in range(count)]

        finished = await _unless_gone(collect(), request)
        failed = next((output.error for output in finished if output.error), None)
        if failed is not None:
            raise _Refused(500, failed)
        logprobs = [self._logprobs(answer).take(output) for output in finished]
        return JSONResponse(answer.whole(finished, prompts, logprobs))

    def _logprobs(self, answer: Answer) -> LogprobPieces:
        return LogprobPieces(self.engine.tokenizer, is_chat=answer.is_chat)

    async def _events(
        self, body: Body, answer: Answer, params: list[SamplingParams], first: Any, outputs: Any,
        prompts: int, request: Request,
    ) -> AsyncIterator[str]:  # fmt: skip
        """Yield server-sent events; whoever closes it, or goes away, aborts the requests."""
        deltas = [TextDeltas(own.stop) for own in params]
        logprobs = [self._logprobs(answer) for _ in params]
        last: dict[int, RequestOutput] = {}
        async with aclosing(outputs):
            while first is not None:
                if await request.is_disconnected():
                    return
                index, output = first
                if output.error is not None:
                    yield _event(_content(500, output.error))
                    return
                text = deltas[index].take(output.text or "", finished=output.finished)
                if text or output.finished:
                    piece = answer.piece(
                        index, text, output.finish_reason, first=index not in last,
                        logprobs=logprobs[index].take(output),
                    )  # fmt: skip
                    yield _event(piece)
                    last[index] = output
                try:
                    first = await anext(outputs, None)
                except Exception as error:
                    # The status has been sent: the client hears of it here, and the log below.
                    yield _event(_content(500, f"{type(error).__name__}: {error}"))
                    raise
        if body.stream_options.include_usage:
            yield _event(answer.last([last[i] for i in range(len(params))], prompts))
        yield "data: [DONE]\n\n"


async def _unless_gone(work: Coroutine[Any, Any, Any], request: Request) -> Any:
    """Return what `work` comes to; cancel it if the client goes away before.

    Raises:
        _Refused: the client has gone, or `work` raised `ValueError`.
    """
    done = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise _Refused(CLIENT_CLOSED, "the client has gone")
        return done.result()
    except ValueError as error:
        raise _Refused(400, str(error)) from None
    finally:
        for task in (done, gone):
            task.cancel()
        await asyncio.gather(done, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _invalid(errors: Sequence[Any]) -> str:
    """Return what is wrong with the first wrong field; it may be none of several kinds."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return f"the body is not valid JSON at character {first['loc'][-1]}: {reason}"
    place = first["loc"][1:2]
    same = [error for error in errors if error["loc"][1:2] == place]
    if len(same) == 1:
        return ": ".join([".".join(map(str, first["loc"][1:])) or "body", first["msg"]])
    return f"{place[0]}: " + ", or ".join(dict.fromkeys(error["msg"] for error in same))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _content(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind}}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(_content(status, message), status_code=status)
