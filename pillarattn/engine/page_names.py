"""Names of full pages: two pages have one name if their tokens and all those before are equal."""

from __future__ import annotations

import hashlib
from array import array


class PageNames:
    """The names of one request's pages, made when they are asked for.

    Each is the hash of the page's tokens and of the name before it, and so of the whole text up to
    its end.

    Args:
        prompt: token ids.
        output: token ids after them; a list that grows.
        page_size: tokens of a page.
    """

    def __init__(self, prompt: list[int], output: list[int], page_size: int) -> None:
        self._prompt, self._output, self._size = prompt, output, page_size
        self._names: list[bytes] = []

    def __getitem__(self, page: int) -> bytes:
        """Return the name of a full page.

        Raises:
            ValueError: the text ends before the page does.
        """
        tokens = len(self._prompt) + len(self._output)
        if (page + 1) * self._size > tokens:
            raise ValueError(f"page {page} of {self._size} tokens is not full: there are {tokens}")
        while len(self._names) <= page:
            start = len(self._names) * self._size
            before = self._names[-1] if self._names else b""
            data = array("q", self._tokens(start, start + self._size)).tobytes()
            self._names.append(hashlib.sha256(before + data).digest())
        return self._names[page]

    def _tokens(self, start: int, end: int) -> list[int]:
        size = len(self._prompt)
        if end <= size:
            return self._prompt[start:end]
        return self._prompt[start:] + self._output[max(0, start - size) : end - size]
