"""What a run leaves to the next one of its kind: buffers, and passes recorded over them."""

from __future__ import annotations

from typing import Any
from weakref import getweakrefs, ref


class KeptRun:
    """Holds at most one run's memory, under a key that says what may use it.

    It belongs to one generator, and is no part of its settings: copies and pickles begin empty.
    """

    def __init__(self) -> None:
        self._held: tuple[Any, Any, Any] | None = None

    def take(self, key: Any) -> Any:
        """Return what is held under `key` and let go of it; None, and nothing is held, otherwise.

        What another kind of run left would stand beside its own.
        """
        # A single step of the interpreter, so that two threads cannot both take it.
        held = self.__dict__.pop("_held", None)
        self._held = None
        return held[1] if held is not None and held[0] == key else None

    def keep(self, key: Any, value: Any, *, owner: Any) -> None:
        """Hold `value`, instead of anything before, as long as `owner` lives."""
        self._held = key, value, Tie(owner, self)

    def free(self) -> None:
        """Let go of everything."""
        self._held = None

    def __reduce__(self) -> tuple[type[KeptRun], tuple[()]]:
        return KeptRun, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptRun:
        return KeptRun()


def free_all_of(owner: Any) -> None:
    """Let go of everything that is held as long as `owner` lives, whoever holds it."""
    for tie in getweakrefs(owner):
        if isinstance(tie, Tie):
            tie.end()


class Tie(ref[Any]):
    """An owner, whose end is that of what is held for it.

    Args:
        owner: not kept alive; nor is the next one.
        kept: holds it.
    """

    __slots__ = ("_kept",)
    _kept: ref[KeptRun]

    def __new__(cls, owner: Any, kept: KeptRun) -> Tie:
        tie = super().__new__(cls, owner, cls.end)
        tie._kept = ref(kept)
        return tie

    def __init__(self, owner: Any, kept: KeptRun) -> None:
        """Do nothing: what a `ref` is, it is from `__new__` on."""

    def end(self) -> None:
        """Let go of what is held, but not of what another owner has left since."""
        kept = self._kept()
        held = None if kept is None else kept.__dict__.get("_held")
        if kept is not None and held is not None and held[2] is self:
            kept.free()
