"""Parts of a run that a user may name, describe or hand over: policies and drafters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Protocol, Self, TypeVar

from pillarattn.registry import Registry


class Part(Protocol):
    """What can be handed over: it gives a copy of itself to each generation."""

    def fresh(self) -> Self:
        """Return a copy for one generation, without history."""
        ...


P = TypeVar("P", bound=Part)


def build_part(registry: Registry[P], value: Any) -> P:
    """Return the part that a config's `value` means, without history.

    Args:
        registry: where names are looked up.
        value: a name, `{"name": ..., **arguments}`, or an object, of which a copy is returned.

    Raises:
        ValueError: the name is unknown or the arguments do not fit.
    """
    if isinstance(value, str):
        return registry.get(value)()
    if isinstance(value, dict):
        arguments = {key: item for key, item in value.items() if key != "name"}
        cls = registry.get(value["name"])
        try:
            return cls(**arguments)
        except TypeError as error:
            raise ValueError(f"{registry.kind} {value['name']!r}: {error}") from None
    part: P = value.fresh()
    return part


def named_arguments(part: Any) -> dict[str, Any]:
    """Return `{"name": ..., **arguments}` of a part whose plain public attributes are arguments."""
    arguments = {
        key: value
        for key, value in vars(part).items()
        if not key.startswith("_") and key != "name" and isinstance(value, (int, float, str))
    }
    return {"name": part.name or type(part).__name__, **arguments}


def shown(part: Any) -> str:
    """Return a part as the call that makes it."""
    arguments = {key: value for key, value in named_arguments(part).items() if key != "name"}
    inside = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"{type(part).__name__}({inside})"


class NamedPart(ABC):
    """A part with a registered name, whose plain public attributes are its arguments.

    Attributes:
        name: the registered name.
    """

    name: str = ""

    @abstractmethod
    def fresh(self) -> Self:
        """Return a copy for one generation, without history."""

    def reset(self) -> None:
        """Forget a generation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the plain arguments, as a config stores them."""
        return named_arguments(self)

    def __repr__(self) -> str:
        return shown(self)


class RoundPolicy(NamedPart):
    """A part that chooses something for each round by the rounds that are over."""

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """Learn how many tokens were drafted, and accepted and kept, in the rows of a round."""

    def fresh(self) -> Self:
        """Return a copy for one generation, without history."""
        new = copy.deepcopy(self)
        new.reset()
        return new
