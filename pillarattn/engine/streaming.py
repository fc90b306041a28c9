"""Streams of outputs for any number of readers, who drive the engine between them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from pillarattn.engine.request import RequestOutput


class StreamDriver:
    """Hands each output to the reader of its request; whoever waits runs the next step.

    Args:
        step: runs one step, and calls `deliver` for each output. It runs in a thread, one at a
            time, so that the event loop stays free.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._waiting: dict[str, deque[RequestOutput]] = {}
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def has_reader(self, request_id: str) -> bool:
        """Whether somebody waits for outputs of a request."""
        return request_id in self._waiting

    def open(self, request_id: str) -> None:
        """Keep outputs of a request from now on, until `outputs` has yielded the last one."""
        self._waiting.setdefault(request_id, deque())

    def deliver(self, output: RequestOutput) -> RequestOutput:
        """Keep an output for its reader, if it has one; return it."""
        if output.request_id in self._waiting:
            self._waiting[output.request_id].append(output)
        return output

    async def outputs(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request up to its last one."""
        mine = self._waiting.setdefault(request_id, deque())
        try:
            while True:
                while mine:
                    output = mine.popleft()
                    yield output
                    if output.finished:
                        return
                async with self._turn():
                    # Another reader's step may have brought something meanwhile.
                    if not mine:
                        await asyncio.to_thread(self._step)
        finally:
            del self._waiting[request_id]

    def _turn(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            self._lock, self._loop = asyncio.Lock(), loop
        return self._lock
