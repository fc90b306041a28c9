"""The contract of a drafter."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from pillarattn.datatypes import Draft
from pillarattn.decoding.acceptance.base import AcceptanceRule
from pillarattn.decoding.draft_length import ConstantLength, DraftLength
from pillarattn.decoding.history import History
from pillarattn.decoding.parts import NamedPart
from pillarattn.decoding.target import LogitsRule, Target
from pillarattn.modules.step import StepState
from pillarattn.registry import Registry

# Makes a `Target` over the run's prompt of what a user gave as a draft model.
TargetBuilder = Callable[[Any], Target]


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
        idle: rows that have ended, whose drafts nobody reads.
        length: may end a row's draft before k tokens.
        vocabulary: size of the target's logits; None: any draft model has the same.
    """

    target: Target
    history: History
    rule: AcceptanceRule
    process: LogitsRule
    step: StepState
    k: int
    idle: frozenset[int] = frozenset()
    length: DraftLength = ConstantLength()  # noqa: RUF009 - it has no state
    vocabulary: int | None = None

    @property
    def running(self) -> list[int]:
        """Rows whose drafts matter."""
        return [row for row in range(self.history.batch) if row not in self.idle]


class Drafter(NamedPart):
    """Proposes up to k tokens a row and leaves the target's cache at the length it found.

    A draft may depend on anything but the tokens that the target is yet to choose. Its `probs` must
    be what each token was drawn from, given the tokens before it.

    Attributes:
        needs_selections: whether drafts run the target over selected keys; if not, verification
            spares the work of scoring and selecting.
        reads_target: whether drafts go on from what the target's last pass left behind.
    """

    needs_selections: bool = True
    reads_target: bool = False

    @abstractmethod
    def draft(self, request: DraftRequest) -> Draft:
        """Return the draft of one round."""

    def prepare(self, build: TargetBuilder) -> None:
        """Get ready for one generation; drafters with a model of their own have it built here."""

    def attach(self, target: Target) -> None:
        """Say, before the prompt runs, what the target must keep for the drafter."""

    @property
    def scratch(self) -> int:
        """Tokens past a draft's last one that a drafter may write to the history and the cache."""
        return 0

    def fresh(self) -> Self:
        """Return a copy for one generation, that shares weights but no history."""
        new = copy.copy(self)
        new.reset()
        return new


DRAFTERS: Registry[Drafter] = Registry("drafter")
