"""Queues of work that run side by side: streams on a GPU, and one after the other on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

# Lanes: where passes run, to the host, and from it.
MAIN, DOWN, UP = "main", "down", "up"


class Lanes(Protocol):
    """Queues of work: what one holds runs in order, and beside what the others hold."""

    def empty(self, lane: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory that `lane` writes first, of the dtype and device of `like`."""

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """Put work at a lane's end."""

    def mark(self, lane: str) -> Any:
        """Return a mark that is reached when all that a lane holds so far is done."""

    def wait(self, lane: str, mark: Any) -> None:
        """Let what comes next in a lane begin after the mark."""

    def is_reached(self, mark: Any) -> bool:
        """Whether a mark is reached."""

    def finish(self) -> None:
        """Wait, on the host, until all lanes are empty."""


class OneLane:
    """On a CPU: work is done when it is handed in."""

    def empty(self, lane: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """See `Lanes.empty`."""
        return like.new_empty(shape)

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """See `Lanes.run`."""
        work()

    def mark(self, lane: str) -> None:
        """See `Lanes.mark`."""

    def wait(self, lane: str, mark: Any) -> None:
        """See `Lanes.wait`."""

    def is_reached(self, mark: Any) -> bool:
        """See `Lanes.is_reached`."""
        return True

    def finish(self) -> None:
        """See `Lanes.finish`."""


class CudaLanes:
    """Streams of one GPU; the caller's is the main one.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of another priority than streams that record graphs: PyTorch hands out a few in turns, and
        # what came to lie in one that records would be recorded.
        self._own = {lane: torch.cuda.Stream(device, priority=-1) for lane in (DOWN, UP)}

    def _stream(self, lane: str) -> Any:
        return self._own.get(lane) or torch.cuda.current_stream(self.device)

    def empty(self, lane: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """See `Lanes.empty`."""
        with torch.cuda.stream(self._stream(lane)):
            # What the lane held before may still use memory that the allocator gives it again.
            return like.new_empty(shape)

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """See `Lanes.run`."""
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: str) -> Any:
        """See `Lanes.mark`."""
        return self._stream(lane).record_event()

    def wait(self, lane: str, mark: Any) -> None:
        """See `Lanes.wait`."""
        self._stream(lane).wait_event(mark)

    def is_reached(self, mark: Any) -> bool:
        """See `Lanes.is_reached`."""
        return bool(mark.query())

    def finish(self) -> None:
        """See `Lanes.finish`."""
        for lane in (MAIN, DOWN, UP):
            self._stream(lane).synchronize()
