"""Log probabilities of an answer's tokens in OpenAI's words, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pillarattn.engine.logprobs import TokenLogprob
from pillarattn.engine.output_text import HALF
from pillarattn.engine.request import RequestOutput

# Tokens before one that its text may depend on.
CONTEXT = 4
# What JSON has for minus infinity, as OpenAI's routes do.
LOWEST = -9999.0

# The tokens before one, and that one.
Pair = tuple[tuple[int, ...], TokenLogprob]


class LogprobPieces:
    """Log probabilities of one sample's tokens that no piece has had yet.

    A token's text is what it adds to that of the tokens before it. One that is part of a character
    has U+FFFD instead, and no bytes.

    Args:
        tokenizer: turns tokens into text.
        is_chat: whether they are those of a message, or of plain text.
    """

    def __init__(self, tokenizer: Any, *, is_chat: bool) -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat
        self._taken = self._offset = 0

    def take(self, output: RequestOutput) -> dict[str, Any] | None:
        """Return those of the tokens since the last call; None: they are not wanted."""
        if output.logprobs is None:
            return None
        new, tokens = output.logprobs[self._taken :], output.token_ids
        befores = [tokens[max(at - CONTEXT, 0) : at] for at in range(self._taken, len(tokens))]
        self._taken += len(new)
        pairs = list(zip(befores, new, strict=False))
        return self._message(pairs) if self._is_chat else self._plain(pairs)

    def _message(self, pairs: list[Pair]) -> dict[str, Any]:
        content = [
            {
                **self._named(before, one.token_id, one.logprob),
                "top_logprobs": [self._named(before, token, value) for token, value in one.top],
            }
            for before, one in pairs
        ]
        return {"content": content, "refusal": None}

    def _plain(self, pairs: list[Pair]) -> dict[str, Any]:
        texts = [self._text(before, one.token_id) for before, one in pairs]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        top: list[dict[str, float]] = []
        for text, (before, one) in zip(texts, pairs, strict=True):
            # Tokens of one text: the likeliest stands for them. The emitted one is always there.
            likeliest = {
                self._text(before, token): _finite(value) for token, value in reversed(one.top)
            }
            top.append({**likeliest, text: _finite(one.logprob)})
        values = [_finite(one.logprob) for _, one in pairs]
        return {
            "tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets,
        }  # fmt: skip

    def _named(self, before: Sequence[int], token: int, value: float) -> dict[str, Any]:
        text = self._text(before, token)
        known = None if HALF in text else list(text.encode())
        return {"token": text, "logprob": _finite(value), "bytes": known}

    def _text(self, before: Sequence[int], token: int) -> str:
        known, whole = self._decoded(before), self._decoded([*before, token])
        is_added = whole.startswith(known) and HALF not in whole[-1:] + known[-1:]
        return whole[len(known) :] if is_added else self._decoded([token])

    def _decoded(self, tokens: Sequence[int]) -> str:
        # End tokens are tokens too, though no text shows them.
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def _finite(value: float) -> float:
    return max(value, LOWEST)
