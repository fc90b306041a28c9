"""Follows a gate from round to round: what the coming round drafts, scores and selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pillarattn.decoding.cost_gate.choice import Choice, Gate, GateDecision, ObservedRound
from pillarattn.decoding.cost_gate.round_clock import RoundClock

# Tokens after which a selection is too old to draft with: until then drafts read what was written
# since it was made, and a plain step or two need not pay for a new one.
FRESH = 16
# Rounds that may be slower than those to come, in a row; after them, a pass is never recorded.
MOST_UNSETTLED = 8


class Pace:
    """The rounds of one generation under a gate.

    A selection needs the scores of a pass. While decoding plainly no pass leaves any; where the
    gate wants to draft again and the last selection is too old, one plain step collects scores, a
    selection is made of them, as at the prompt's end, and drafts begin with the round after it.

    Args:
        gate: chooses.
        clock: measures rounds.
        selects_keys: whether drafts read selected keys.
        needs_scores: whether those are chosen by scores of the pass before.
        s: share of the first selection.

    Attributes:
        k: tokens that the coming round drafts; 0 is a plain step.
        collects: whether its verify pass must leave scores.
        decisions: what the gate chose, where that changed.
    """

    def __init__(
        self, gate: Gate, clock: RoundClock, *, selects_keys: bool, needs_scores: bool, s: float
    ) -> None:
        self.gate = gate
        self.clock = clock
        self.k = 0
        self.s = s
        self.collects = False
        self.decisions: list[GateDecision] = []
        self._selects_keys = selects_keys
        self._needs_scores = selects_keys and needs_scores
        self._choice: Choice | None = None
        self._left = 0
        self._rounds = 0
        self._selected_at: int | None = None
        # Rounds in a row that were not settled: plain ones, and those that were to draft.
        self._unsettled = [0, 0]

    @property
    def stays_plain(self) -> bool:
        """Whether the round after this plain one is plain too, whatever becomes of this one."""
        choice = self._choice
        return choice is not None and choice.k == 0 and self._left > 0

    def begin(self, place: Callable[[], tuple[int, int]], *, seeded: bool) -> bool:
        """Choose the first round, after the prompt; return whether keys must be selected for it.

        Args:
            place: returns the tokens in the cache, of the longest row, and how many a row may still
                emit, of the row with the most.
            seeded: whether the prompt's last rows will choose keys if `k` is not 0 then.
        """
        self._selected_at = place()[0] if seeded else None
        selects = self.advance(place, scored=False)
        if self.k == 0:
            self._selected_at = None
        return selects

    def advance(self, place: Callable[[], tuple[int, int]], *, scored: bool) -> bool:
        """Choose the coming round; return whether keys must be selected for it now.

        Args:
            place: see `begin`; a plain round amid others does not ask it.
            scored: whether the pass before left scores.
        """
        if self._left == 0 or self._choice is None:
            self._choose(*place())
        choice = self._choice
        assert choice is not None
        self._left -= 1
        self.k = choice.k
        self.collects = self.k > 0 and self._needs_scores
        if self.k == 0 or not self._selects_keys:
            return False
        length, _ = place()
        if scored or not self._needs_scores:
            self.s = choice.s
            self._selected_at = length
            return True
        if self._selected_at is None or length - self._selected_at > FRESH:
            # A plain step that scores; the choice begins after it.
            self._left += 1
            self.k = 0
        return False

    def finish_round(
        self,
        k: int,
        length: int,
        accepted: list[int],
        *,
        settled: bool = True,
        width: int | None = None,
    ) -> None:
        """Tell the gate of a round, once its tokens are known.

        Args:
            k: drafts that it was meant to have.
            length: tokens in the cache where it began, of the longest row.
            accepted: drafts accepted and kept, by row that ran.
            settled: whether its passes ran as they will from now on: none was recorded.
            width: see `ObservedRound`.
        """
        seconds, draft_seconds = self.clock.lap()
        self._rounds += 1
        kind = int(k > 0)
        self._unsettled[kind] = 0 if settled else self._unsettled[kind] + 1
        settled = not 0 < self._unsettled[kind] <= MOST_UNSETTLED
        # A round begins where the last one's tokens are known, so that selection belongs to the one
        # that uses it. One that drafts with an old selection is a little cheaper than its kind.
        usual = k > 0 or not self.collects
        self.gate.observe(
            ObservedRound(
                k, self.s, length, draft_seconds, seconds, accepted, usual, settled, width
            )
        )

    def to_list(self) -> list[dict[str, Any]]:
        """Return the decisions as plain values."""
        return [decision.to_dict() for decision in self.decisions]

    def _choose(self, length: int, room: int) -> None:
        choice = self.gate.choose(length, room)
        before = self._choice
        if before is None or _kind(choice) != _kind(before):
            self.decisions.append(GateDecision(self._rounds, length, choice))
        self._choice = choice if choice.rounds >= 1 else replace(choice, rounds=1)
        self._left = self._choice.rounds


def _kind(choice: Choice) -> tuple[int, float, str]:
    return choice.k, choice.s, choice.reason
