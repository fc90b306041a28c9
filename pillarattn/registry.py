"""One registry type: a name maps to a class, and a wrong name says which names exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pillarattn.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Named classes of one kind, filled by decorator; it never holds instances.

    `kind` is the noun that error messages use ("strategy", "drafter", ...).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return a decorator that files a class under `name`; a taken name raises `ValueError`."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"a {self.kind} name must be a non-empty string, got {name!r}")

        def add(cls: type[T]) -> type[T]:
            if not isinstance(cls, type):
                raise TypeError(f"{self.kind} {name!r} must be a class, got {type(cls).__name__}")
            taken = self._classes.get(name)
            # A notebook cell that is run twice defines the same class again: that is no conflict.
            if taken is not None and (taken.__module__, taken.__qualname__) != (
                cls.__module__,
                cls.__qualname__,
            ):
                raise ValueError(
                    f"{self.kind} {name!r} is already registered by {taken.__module__}."
                    f"{taken.__qualname__}; choose another name"
                )
            self._classes[name] = cls
            return cls

        return add

    def get(self, name: str) -> type[T]:
        """Return the class filed under `name`; an unknown name raises `UnknownNameError`."""
        try:
            return self._classes[name]
        except (KeyError, TypeError):
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}; choose one of {', '.join(self.names())}"
            ) from None

    def names(self) -> list[str]:
        """Return every registered name, sorted."""
        return sorted(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
