"""What can be shown of a growing text, because nothing that follows will change it."""

from __future__ import annotations

from collections.abc import Sequence

REPLACEMENT = "\ufffd"


class TextDeltas:
    """Turns the text of each output of a stream into what is new and final in it.

    Held back are halves of characters, and what may be the beginning of a stop string.

    Args:
        stop: the stop strings, which the text does not show.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._shown = 0

    def take(self, text: str, *, finished: bool) -> str:
        """Return what comes after all that was returned before; all the rest once finished."""
        end = len(text) if finished else self._settled(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _settled(self, text: str) -> int:
        end = len(text.rstrip(REPLACEMENT))
        starts = (
            end - size
            for stop in self._stop
            for size in range(1, min(len(stop), end + 1))
            if text[end - size : end] == stop[:size]
        )
        return min((end, *starts))
