"""Texts on which a processor fails: its error where plain decoding would meet it, nowhere else."""

from __future__ import annotations

from pillarattn.decoding.history import History


class DeadEnds:
    """Remembers at which rows and lengths a processor failed, and how.

    Drafts walk past the end of a text, where a grammar may know no continuation, and rows run ahead
    of a batch that another row is about to end. Plain decoding sees none of these texts. So nothing
    is raised while logits are processed, only once a token is final that was chosen there.
    """

    def __init__(self) -> None:
        self._errors: dict[tuple[int, int], Exception] = {}

    def note(self, row: int, length: int, error: Exception) -> None:
        """Note that a processor fails on the text of `length` tokens of a row."""
        self._errors[row, length] = error

    def forget(self, row: int, length: int) -> None:
        """Take back what was noted of a text, which may have been another draft's."""
        self._errors.pop((row, length), None)

    def raise_if_reached(self, history: History, length: int) -> None:
        """Raise if some row goes on past `length` tokens although a processor failed there.

        Raises:
            Exception: what the processor raised.
        """
        if not self._errors:
            return
        for row, reached in enumerate(history.lengths):
            error = self._errors.get((row, length))
            if error is not None and reached > length:
                raise error
