"""The contract of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pillarattn.datatypes import Draft
from pillarattn.decoding.acceptance.base import AcceptanceRule
from pillarattn.decoding.history import History
from pillarattn.decoding.target import LogitsRule, Target
from pillarattn.modules.step import StepState
from pillarattn.registry import Registry


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter may use.

    Attributes:
        target: the model and its cache, at the committed length.
        history: committed tokens; a drafter sketches its own after them.
        rule: draws tokens so that the verdict knows their distribution.
        process: processes logits exactly as the target's are.
        step: the draft phase and the round's selections.
        k: tokens to draft, >= 1.
    """

    target: Target
    history: History
    rule: AcceptanceRule
    process: LogitsRule
    step: StepState
    k: int


class Drafter(ABC):
    """Proposes k tokens a row and leaves the cache at the length it found."""

    @abstractmethod
    def draft(self, request: DraftRequest) -> Draft:
        """Return the draft of one round."""


DRAFTERS: Registry[Drafter] = Registry("drafter")
