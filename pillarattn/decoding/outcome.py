"""Where rows end and what they leave behind: stops, streamed tokens, recorded logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pillarattn.decoding.history import History
from pillarattn.decoding.target import StopRule


class Outcome:
    """Follows every row to its end, exactly where plain decoding would have ended it.

    Rules that look at one row are asked for each new token in order; rules that may look at the
    whole batch are asked for a length once every row has reached it, as plain decoding would have.

    Attributes:
        stopped_at: each row's length at its end, or None while it goes on.
        settled: length up to which every row is final.
    """

    def __init__(
        self,
        history: History,
        stop: StopRule,
        *,
        max_length: int,
        emit: Callable[[Tensor], None] | None,
        keep_padding: bool,
    ) -> None:
        self.history = history
        self.stop = stop
        self.max_length = max_length
        self.keep_padding = keep_padding
        self.stopped_at: list[int | None] = [None] * history.batch
        self.settled = history.prompt_length
        self._emit = emit

    def runs_on(self, row: int) -> bool:
        """Whether a row still chooses its own tokens."""
        return self.stopped_at[row] is None or not self.stop.pads_finished_rows

    def is_idle(self, row: int) -> bool:
        """Whether a row's coming tokens are of no use to anyone."""
        if self.stopped_at[row] is None:
            return False
        if self.stop.pads_finished_rows and not self.keep_padding:
            return True
        return self.history.lengths[row] >= (self.end or self.max_length)

    @property
    def end(self) -> int | None:
        """Length of the output, once every row has ended."""
        ends = [n for n in self.stopped_at if n is not None]
        return max(ends) if len(ends) == len(self.stopped_at) else None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to decode."""
        end = self.end
        return end is not None and all(
            n >= end or self.is_idle(row) for row, n in enumerate(self.history.lengths)
        )

    def update(self, before: list[int]) -> None:
        """Look at tokens committed since the lengths `before`: stop rows, stream what is final."""
        history = self.history
        first, last = min(before) + 1, max(history.lengths)
        for length in range(first, last + 1):
            rows = [
                row
                for row, old in enumerate(before)
                if self.stopped_at[row] is None and old < length <= history.lengths[row]
            ]
            if rows:
                for row, ends in zip(rows, self.stop.finished(history, rows, length), strict=True):
                    if ends or length >= self.max_length:
                        self._stop(row, length)
        self._settle()

    def _settle(self) -> None:
        while True:
            reach = self.end or max(self.history.lengths)
            for row, length in enumerate(self.history.lengths):
                if not (self.is_idle(row) or (self.stopped_at[row] and self._pads)):
                    reach = min(reach, length)
            if self.settled >= reach:
                return
            self.settled += 1
            self._fill_padding(self.settled)
            together = self.stop.finished_together(self.history, self.settled)
            for row, ends in enumerate(together or []):
                if ends and self._later(row, self.settled):
                    self._stop(row, self.settled)
            if self._emit is not None:
                # Not where the default device is: a streamer that reads would wait for it.
                self._emit(torch.tensor(self._final(self.settled), device="cpu"))

    @property
    def _pads(self) -> bool:
        return self.stop.pads_finished_rows

    def _later(self, row: int, length: int) -> bool:
        at = self.stopped_at[row]
        return at is None or at > length

    def _stop(self, row: int, length: int) -> None:
        self.stopped_at[row] = length
        if self._pads:
            self.history.truncate(row, length)

    def _fill_padding(self, length: int) -> None:
        for row, at in enumerate(self.stopped_at):
            if self._is_padding(at, length):
                self.history.ids[row, length - 1] = self.stop.pad_token

    def _is_padding(self, at: int | None, length: int) -> bool:
        """Whether the last of `length` tokens is padding in a row that stopped at `at`."""
        return self._pads and at is not None and at < length

    def _final(self, length: int) -> list[int]:
        """Return the last of each row's `length` tokens, without asking the device."""
        return [
            self.stop.pad_token if self._is_padding(at, length) else self.history.token(row, length)
            for row, at in enumerate(self.stopped_at)
        ]

    def sequences(self) -> Tensor:
        """Return the finished output `[B, T]`."""
        end = self.end or max(self.history.lengths)
        for length in range(self.settled + 1, end + 1):
            self._fill_padding(length)
        return self.history.ids[:, :end].clone()


class Recorder:
    """Keeps each row's logits by new-token index, for callers who asked for scores or logits."""

    def __init__(self, batch: int, *, scores: bool, logits: bool) -> None:
        self._scores: list[list[Tensor]] | None = [[] for _ in range(batch)] if scores else None
        self._logits: list[list[Tensor]] | None = [[] for _ in range(batch)] if logits else None

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._scores is not None or self._logits is not None

    def keep(self, row: int, scores: Tensor, logits: Tensor) -> None:
        """Keep processed and raw logits `[n, V]` of a row's n new tokens."""
        for store, rows in ((self._scores, scores), (self._logits, logits)):
            if store is not None:
                store[row].extend(line.clone() for line in rows)

    def truncate(self, row: int, tokens: int) -> None:
        """Forget all but the first `tokens` of a row."""
        for store in (self._scores, self._logits):
            if store is not None:
                del store[row][tokens:]

    def scores_so_far(self, tokens: int) -> tuple[Tensor, ...] | None:
        """Return processed logits `[B, V]` of the first `tokens` new tokens, if kept."""
        return _columns(self._scores, tokens)

    def logits_so_far(self, tokens: int) -> tuple[Tensor, ...] | None:
        """Return raw logits `[B, V]` of the first `tokens` new tokens, if kept."""
        return _columns(self._logits, tokens)


def _columns(store: list[list[Tensor]] | None, tokens: int) -> tuple[Tensor, ...] | None:
    if store is None:
        return None
    missing = next((torch.zeros_like(row[0]) for row in store if row), None)
    return tuple(
        # Only a rule that looks in before the end can meet a row that is padded but not yet scored.
        torch.stack([row[i] if i < len(row) else missing for row in store])  # type: ignore[misc]
        for i in range(tokens)
    )
