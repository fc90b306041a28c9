"""Several streams of an engine as one, and the pieces of JSON that their outputs become."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pillarattn.engine.request import RequestOutput


async def merged(
    streams: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield (number of the stream, output) as outputs come; closing it closes all streams.

    Each output holds all before it: whoever reads slowly gets the newest one of each stream.

    Raises:
        Exception: what a stream raised.
    """
    # Numbers of streams with news; None is the end of one.
    queue: asyncio.Queue[int | Exception | None] = asyncio.Queue()
    newest: dict[int, RequestOutput] = {}

    async def pump(number: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    if number not in newest:
                        queue.put_nowait(number)
                    newest[number] = output
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item, newest.pop(item)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Answer:
    """What the pieces of one answer have in common.

    Attributes:
        model: the served name.
        is_chat: whether pieces are messages, or plain text.
        id, created: of the answer.
    """

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, outputs: Sequence[RequestOutput], prompts: int, logprobs: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the answer to a request that does not stream; `logprobs` of each output."""
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": [
                {
                    "index": index,
                    **({"message": {"role": "assistant", "content": output.text or ""}}
                       if self.is_chat else {"text": output.text or ""}),
                    "logprobs": own,
                    "finish_reason": output.finish_reason,
                }
                for index, (output, own) in enumerate(zip(outputs, logprobs, strict=True))
            ],
            "usage": usage(outputs, prompts),
        }  # fmt: skip

    def piece(
        self, index: int, text: str, finish_reason: str | None, *, first: bool, logprobs: Any
    ) -> Any:
        """Return a piece of a stream."""
        role = {"role": "assistant"} if first else {}
        body = {"delta": {**role, "content": text}} if self.is_chat else {"text": text}
        return {
            **self._head("chat.completion.chunk" if self.is_chat else "text_completion"),
            "choices": [
                {"index": index, **body, "logprobs": logprobs, "finish_reason": finish_reason}
            ],
        }

    def last(self, outputs: Sequence[RequestOutput], prompts: int) -> dict[str, Any]:
        """Return the piece that has only the usage."""
        head = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        return {**head, "choices": [], "usage": usage(outputs, prompts)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(outputs: Sequence[RequestOutput], prompts: int) -> dict[str, Any]:
    """Return the tokens of an answer; each of its `prompts` counts once, whatever its samples."""
    each = max(1, len(outputs) // prompts)
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::each])
    new = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
