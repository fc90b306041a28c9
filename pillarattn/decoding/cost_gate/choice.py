"""What a gate says of the coming rounds, and what it is told of those that are over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# Why a choice was made: what `stats` and the plots show.
REASONS = (
    "measure plain",
    "first probe",
    "speculation pays",
    "speculation does not pay",
    "no draft can pay",
    "probe",
    "probe a neighbour",
    "measure plain again",
    "too few tokens left",
)


@dataclass(frozen=True)
class Choice:
    """How the coming rounds decode.

    Attributes:
        k: tokens to draft a round; 0 is plain decoding.
        s: share of the context that drafts read.
        rounds: how many rounds it holds for, >= 1.
        reason: one of `REASONS`.
        tokens_per_second: what the gate expects of it, per sequence; None: nothing is known yet.
        plain_tokens_per_second: what it expects of plain decoding.
    """

    k: int
    s: float
    rounds: int
    reason: str
    tokens_per_second: float | None = None
    plain_tokens_per_second: float | None = None


@dataclass(frozen=True)
class ObservedRound:
    """A round that is over.

    Attributes:
        k: drafts that it was meant to have; 0 is a plain step.
        s: share of the context that its drafts read.
        length: tokens of context where it began, of the longest row.
        draft_seconds: spent on the draft.
        seconds: from its begin to the next one's, selection included.
        accepted: drafts accepted and kept, by row that still ran.
        is_usual: False where it did more than its kind does, so that its time tells nothing.
        is_settled: False where a pass of it ran for the first times: it will be faster from now on.
        width: tokens a row that its verify pass ran with; None: one more than its drafts.
    """

    k: int
    s: float
    length: int
    draft_seconds: float
    seconds: float
    accepted: Sequence[int]
    is_usual: bool = True
    is_settled: bool = True
    width: int | None = None


@dataclass(frozen=True)
class GateDecision:
    """A choice that differs from the one before it, as statistics keep it.

    Attributes:
        round: the first round that it held for, 0-based.
        length: tokens of context there, of the longest row.
        choice: what was chosen, and why.
    """

    round: int
    length: int
    choice: Choice

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        choice = self.choice
        return {
            "round": self.round,
            "length": self.length,
            "k": choice.k,
            "s": choice.s,
            "reason": choice.reason,
            "tokens_per_second": choice.tokens_per_second,
            "plain_tokens_per_second": choice.plain_tokens_per_second,
        }


class Gate(Protocol):
    """Chooses how rounds decode; one object serves one generation.

    It may look at rounds that are over and at clocks, never at tokens that are yet to be chosen,
    and so cannot change the law of the output.
    """

    def choose(self, length: int, room: int) -> Choice:
        """Return how to decode from here.

        Args:
            length: tokens of context, of the longest row.
            room: tokens that a row may still emit, of the row with the most.
        """
        ...

    def observe(self, done: ObservedRound) -> None:
        """Learn from a round that is over."""
        ...
