"""Times rounds without waiting for the device more often than they do by themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RoundClock:
    """Seconds of a round and of its draft.

    A round ends where its tokens have reached the host, which waits for the device: the host's
    clock tells it all. On a CUDA device a draft is queued by then, so that events tell its part.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._begun = 0.0
        self._draft_seconds = 0.0
        self._events: tuple[Any, Any] | None = None
        self._drafted = False

    def start(self) -> None:
        """Begin the first round."""
        self._begun = time.perf_counter()

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Time the draft of the round."""
        if not self._is_cuda:
            begun = time.perf_counter()
            yield
            self._draft_seconds = time.perf_counter() - begun
            return
        if self._events is None:
            event: Any = torch.cuda.Event
            self._events = event(enable_timing=True), event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        self._events[0].record(stream)
        yield
        self._events[1].record(stream)
        self._drafted = True

    def lap(self) -> tuple[float, float]:
        """End a round; return its seconds and its draft's, and begin the next one."""
        now = time.perf_counter()
        seconds, self._begun = now - self._begun, now
        draft, self._draft_seconds = self._draft_seconds, 0.0
        if self._drafted and self._events is not None:
            # The verdict has reached the host, and so both events are over.
            self._events[1].synchronize()
            draft = self._events[0].elapsed_time(self._events[1]) / 1000.0
            self._drafted = False
        return seconds, min(draft, seconds)
