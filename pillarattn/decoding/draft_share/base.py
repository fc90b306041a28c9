"""The contract of a policy that says what share of the context drafts read."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Self

from pillarattn.decoding.parts import named_arguments, shown
from pillarattn.registry import Registry


class DraftShare(ABC):
    """Chooses s for each round; one object serves one generation.

    It may look at rounds that are over, and so cannot change the law of the output.

    Attributes:
        name: the registered name.
    """

    name: str = ""

    @abstractmethod
    def choose(self, s: float) -> float:
        """Return the share that the coming round reads, given the configured one."""

    def observe(self, drafted: list[int], accepted: list[int]) -> None:
        """Learn how many tokens were drafted and accepted in the rows of a round."""

    def reset(self) -> None:
        """Forget a generation."""

    def fresh(self) -> Self:
        """Return a copy for one generation, without history."""
        new = copy.deepcopy(self)
        new.reset()
        return new

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the arguments, as a config stores them."""
        return named_arguments(self)

    def __repr__(self) -> str:
        return shown(self)


DRAFT_SHARES: Registry[DraftShare] = Registry("draft share")


@DRAFT_SHARES.register("constant")
class ConstantShare(DraftShare):
    """Reads the configured share in every round."""

    name = "constant"

    def choose(self, s: float) -> float:
        """Return s."""
        return s
