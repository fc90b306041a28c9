"""Streams of outputs for any number of readers, who drive the engine between them."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Container

from pillarattn.engine.request import RequestOutput
from pillarattn.patch.autocast import carried


class StreamDriver:
    """Hands each output to the reader of its request; whoever waits runs the next step.

    Args:
        step: runs one step, and calls `deliver` for each output. It runs in a thread, one at a
            time, so that the event loop stays free.
        device: of the model: its autocast block, if the reader is in one, goes along.
    """

    def __init__(self, step: Callable[[], object], *, device: str = "cpu") -> None:
        self._step, self._device = step, device
        self._numbers = itertools.count()
        self._waiting: dict[str, deque[RequestOutput]] = {}
        self._collected: dict[str, deque[RequestOutput]] = {}
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def has_reader(self, request_id: str) -> bool:
        """Whether somebody waits for outputs of a request."""
        return request_id in self._waiting

    def new_name(self, taken: Container[str]) -> str:
        """Return a name for a request that is to be read, none of `taken`."""
        names = (f"stream-{number}" for number in self._numbers)
        return next(name for name in names if name not in taken)

    def open(self, request_id: str) -> None:
        """Keep outputs of a request from now on, until `close`."""
        self._waiting.setdefault(request_id, deque())

    def close(self, request_id: str) -> None:
        """Forget the outputs of a request, now and from now on."""
        self._waiting.pop(request_id, None)
        self._collected.pop(request_id, None)

    def collect(self, request_id: str, ended: deque[RequestOutput]) -> None:
        """Put the last output of a request into `ended`, whoever runs the step that brings it."""
        self._collected[request_id] = ended

    def deliver(self, output: RequestOutput) -> RequestOutput:
        """Keep an output for its reader, if it has one; return it."""
        ended = self._collected.pop(output.request_id, None) if output.finished else None
        if ended is not None:
            ended.append(output)
        # Its reader may close it meanwhile, in another thread.
        waiting = self._waiting.get(output.request_id)
        if waiting is not None:
            waiting.append(output)
        return output

    async def outputs(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request up to its last one; it is open."""
        mine = self._waiting[request_id]
        while True:
            while mine:
                output = mine.popleft()
                yield output
                if output.finished:
                    return
            async with self._turn():
                # Another reader's step may have brought something meanwhile.
                if not mine:
                    await asyncio.to_thread(carried(self._device, self._step))

    def _turn(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            self._lock, self._loop = asyncio.Lock(), loop
        return self._lock
