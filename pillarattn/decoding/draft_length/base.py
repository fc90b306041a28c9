"""The contract of a policy that says how many tokens a round drafts."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Self

from torch import Tensor

from pillarattn.decoding.parts import named_arguments, shown
from pillarattn.registry import Registry


class DraftLength(ABC):
    """Chooses the length of each draft, at most k; one object serves one generation.

    Whatever it does, the output keeps its law: it may look at rounds that are over and at the
    logits of the draft so far, and so never at a token that it then leaves out.

    Attributes:
        name: the registered name.
    """

    name: str = ""

    @abstractmethod
    def choose(self, k: int) -> int:
        """Return how many tokens to draft in the coming round, 1..k."""

    def goes_on(self, logits: Tensor) -> Tensor | None:
        """Return whether to draft on after tokens drawn from `logits` `[..., V]`, bool `[...]`.

        The logits are the processed ones of the draft. None: whatever they are.
        """
        return None

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


DRAFT_LENGTHS: Registry[DraftLength] = Registry("draft length")
