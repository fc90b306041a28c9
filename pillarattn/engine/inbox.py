"""Work for an engine that may be in the middle of a step, handed in without waiting for its end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Inbox:
    """Does what is posted at once, or right after the step that another thread runs."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._tasks: deque[Callable[[], object]] = deque()
        self._is_stepping = False

    def post(self, task: Callable[[], object]) -> None:
        """Hand in a task; returns before it is done if a step is running."""
        self._tasks.append(task)
        self._do_unless_stepping()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the step that another thread runs, do what was posted, and keep others out."""
        with self._lock:
            self._empty()
            yield

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Be the one that steps: what is posted meanwhile is done at the end."""
        try:
            with self.held():
                self._is_stepping = True
                try:
                    yield
                finally:
                    self._is_stepping = False
        finally:
            # A task may have come after the last look, by one who saw the lock taken.
            self._do_unless_stepping()

    def _do_unless_stepping(self) -> None:
        while self._tasks and not self._is_stepping and self._lock.acquire(blocking=False):
            try:
                self._empty()
            finally:
                self._lock.release()

    def _empty(self) -> None:
        while self._tasks:
            self._tasks.popleft()()
