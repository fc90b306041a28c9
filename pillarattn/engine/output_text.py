"""The text of an output that grows, without decoding all of it at every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a tokenizer gives for half a character.
HALF = "\ufffd"
# Tokens after which a text that ends in it is taken as it is.
LONGEST_TAIL = 64


class OutputText:
    """Decodes what is new of an output, together with a few tokens before it.

    A token's text can depend on its neighbours: the first one may lose a space, and a character may
    be spread over several. So what is new is what the tail has more than it had without the new
    tokens, and a tail begins where an earlier one ended in a whole character. For tokenizers that
    look further back, the last output, which is decoded as a whole, has the last word.

    Args:
        tokenizer: turns tokens into text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Text of the tokens before `_read`; tails begin at `_begin`.
        self._text = ""
        self._begin = self._read = 0

    def of(self, output: Sequence[int]) -> str:
        """Return the text of `output`, which has grown since the last call at most."""
        known = self._decoded(output[self._begin : self._read])
        tail = self._decoded(output[self._begin :])
        text = self._text + tail[len(known) :]
        if not tail.endswith(HALF) or len(output) - self._read > LONGEST_TAIL:
            self._text, self._begin, self._read = text, self._read, len(output)
        return text

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""
