"""The tokens that a level of a chain has decided on so far, row by row."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.history import History


class DraftInProgress:
    """Collects the outcome of judged proposals until each row has k tokens.

    Args:
        history: committed tokens; proposals and outcomes are sketched after them.
        k: tokens wanted of each row.
        spare: columns past k that an outcome may spill into.
        idle: rows that want none.

    Attributes:
        history: the committed tokens and the draft so far, as if they were committed too.
    """

    def __init__(self, history: History, k: int, *, spare: int, idle: frozenset[int]) -> None:
        self.k = k
        # A view: the same buffer of ids, and lengths of its own.
        self.history = copy.copy(history)
        self.history.lengths = list(history.lengths)
        self.produced = [0] * history.batch
        self.running = [row for row in range(history.batch) if row not in idle]
        self._idle = idle
        self._tokens = history.ids.new_zeros(history.batch, k + spare)
        self._probs: Tensor | None = None
        self._wanted = list(self.running)

    @property
    def missing(self) -> int:
        """Tokens that the row furthest behind still wants."""
        return max(self.k - self.produced[row] for row in self.running)

    @property
    def ends(self) -> list[int]:
        """Tokens of each row, the draft so far included."""
        return self.history.lengths

    def add(
        self, proposal: Draft, verdict: Verdict, *, law: Tensor | None, goes_on: Tensor | None
    ) -> None:
        """Append what a proposal came to: accepted tokens and the one after them.

        Args:
            proposal: of j tokens, sketched at the ends of the rows.
            verdict: of the level that keeps the tokens.
            law: `[B, j + 1, V]`, what that level draws from at each position, or None.
            goes_on: `[B, j + 1]` bool, whether a row drafts on after that position, or None.
        """
        ids = self.history.ids
        accepted = torch.tensor(verdict.accepted, device=ids.device).unsqueeze(1)
        following = verdict.next_tokens.unsqueeze(1)
        block = torch.cat([proposal.tokens, following], dim=1)
        # A token of -1 is none; its row ends before it.
        block = block.scatter(1, accepted, following).clamp_min(0)
        ahead = torch.arange(block.shape[1], device=ids.device)
        place = torch.tensor([self.produced, self.history.lengths], device=ids.device)
        # What is written past a row's outcome is overwritten by its next one, or never read.
        self._tokens.scatter_(1, place[0].unsqueeze(1) + ahead, block)
        ids.scatter_(1, place[1].unsqueeze(1) + ahead, block)
        if law is not None:
            if self._probs is None:
                self._probs = law.new_zeros(*self._tokens.shape, law.shape[-1])
            where = (place[0].unsqueeze(1) + ahead).unsqueeze(-1).expand_as(law)
            self._probs.scatter_(1, where, law)
        self._advance(verdict, None if goes_on is None else goes_on.tolist())

    def _advance(self, verdict: Verdict, goes_on: list[list[bool]] | None) -> None:
        possible = (verdict.next_tokens >= 0).tolist()
        still = []
        for row in self.running:
            gained = verdict.accepted[row] + 1
            ended = False
            if not possible[row]:
                gained, ended = gained - 1, True
            if goes_on is not None and False in goes_on[row][:gained]:
                gained, ended = goes_on[row].index(False) + 1, True
            gained = min(gained, self.k - self.produced[row])
            self.produced[row] += gained
            self.history.lengths[row] += gained
            if self.produced[row] < self.k and not ended:
                still.append(row)
        self.running = still

    def finish(self, passes: list[list[int]]) -> Draft:
        """Return the draft."""
        width = max((self.produced[row] for row in self._wanted), default=0)
        lengths = None
        if any(self.produced[row] < width for row in self._wanted):
            lengths = torch.tensor(self.produced, device=self._tokens.device)
        probs = None if self._probs is None else self._probs[:, :width]
        return Draft(self._tokens[:, :width], probs, lengths=lengths, passes=passes)
