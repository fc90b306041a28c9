"""What a run leaves to the next one of its kind: buffers, and passes recorded over them."""

from __future__ import annotations

from typing import Any


class KeptRun:
    """Holds at most one run's memory, under a key that says what may use it.

    It belongs to one generator, and is no part of its settings: copies and pickles begin empty.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._value: Any = None

    def take(self, key: Any) -> Any:
        """Return what is held under `key` and let go of it; None, and nothing is held, otherwise.

        What another kind of run left would stand beside its own.
        """
        value = self._value if self._key == key else None
        self.free()
        return value

    def keep(self, key: Any, value: Any) -> None:
        """Hold `value`, instead of anything before."""
        self._key, self._value = key, value

    def free(self) -> None:
        """Let go of everything."""
        self._key = self._value = None

    def __reduce__(self) -> tuple[type[KeptRun], tuple[()]]:
        return KeptRun, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptRun:
        return KeptRun()
