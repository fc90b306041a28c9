"""Hugging Face stopping criteria, asked row by row at exactly the length where they would be."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from pillarattn.decoding.history import History
from pillarattn.decoding.outcome import Recorder
from pillarattn.patch.dead_ends import DeadEnds

# Criteria that judge each row by its own tokens (or by the clock): rows may be asked apart.
_ROW_WISE = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


class CriteriaRule:
    """Splits a `StoppingCriteriaList` into criteria of one row and criteria of the whole batch.

    Args:
        criteria: as `generate` prepared them.
        pad_token: what finished rows are filled with.
        recorder: gives the scores that criteria may read.
        prompt_length: tokens before the first new one.
        dead_ends: raises once a token is final that no processor would have allowed.
    """

    def __init__(
        self,
        criteria: Any,
        *,
        pad_token: int,
        recorder: Recorder,
        prompt_length: int,
        dead_ends: DeadEnds | None = None,
    ) -> None:
        self._own = StoppingCriteriaList(c for c in criteria if type(c) in _ROW_WISE)
        self._shared = StoppingCriteriaList(c for c in criteria if type(c) not in _ROW_WISE)
        # Plain decoding pads finished rows only if some criterion knows an end-of-sequence token.
        self.pads_finished_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self.pad_token = pad_token
        self._recorder = recorder
        self._prompt_length = prompt_length
        self._dead_ends = dead_ends
        # What a length and the last token tell is told on the host, without waiting for the device.
        self._ends, self._limit, self._others = _known_ends(self._own)

    def finished(self, history: History, rows: list[int], length: int) -> list[bool]:
        """Ask the row-wise criteria about `rows` at `length` tokens."""
        if length >= self._limit:
            verdict = [True] * len(rows)
        else:
            verdict = [history.token(row, length) in self._ends for row in rows]
        if len(self._others):
            index = torch.tensor(rows, device=history.ids.device)
            found = self._others(history.ids[index, :length], None)
            others = torch.as_tensor(found).expand(len(rows)).tolist()
            verdict = [one or other for one, other in zip(verdict, others, strict=True)]
        return verdict

    def finished_together(self, history: History, length: int) -> list[bool] | None:
        """Ask the other criteria about all rows at `length` tokens, which are final in each."""
        if self._dead_ends is not None:
            self._dead_ends.raise_if_reached(history, length - 1)
        if not len(self._shared):
            return None
        scores = self._recorder.scores_so_far(length - self._prompt_length)
        verdict = self._shared(history.ids[:, :length], scores)
        return torch.as_tensor(verdict).expand(history.batch).tolist()


def _known_ends(criteria: Any) -> tuple[frozenset[int], float, Any]:
    """Return the end tokens, the length limit, and the criteria that ask for more than these.

    A limit past the model's position table stays with the others: it warns.
    """
    ends: set[int] = set()
    limit, others = math.inf, StoppingCriteriaList()
    for one in criteria:
        if type(one) is EosTokenCriteria:
            ends |= set(torch.as_tensor(one.eos_token_id).reshape(-1).tolist())
        elif type(one) is MaxLengthCriteria and not _warns(one):
            limit = min(limit, one.max_length)
        else:
            others.append(one)
    return frozenset(ends), limit, others


def _warns(one: MaxLengthCriteria) -> bool:
    table = one.max_position_embeddings
    return table is not None and one.max_length > table
