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
        content = []
        for before, one in pairs:
            values = [one.logprob, *(value for _, value in one.top)]
            own, *top = map(_named, self._texts(before, one), values)
            content.append({**own, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _plain(self, pairs: list[Pair]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for before, one in pairs:
            text, *others = self._texts(before, one)
            value = _finite(one.logprob)
            # Tokens of one text: the likeliest stands for them. The emitted one is always there.
            named = reversed(list(zip(others, one.top, strict=True)))
            likeliest = {other: _finite(its) for other, (_, its) in named}
            found["tokens"].append(text)
            found["token_logprobs"].append(value)
            found["top_logprobs"].append({**likeliest, text: value})
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found

    def _texts(self, before: Sequence[int], one: TokenLogprob) -> list[str]:
        """Return the text of an emitted token, and those of the likeliest beside it."""
        known = self._decoded(before)

        def added(token: int) -> str:
            whole = self._decoded([*before, token])
            is_added = whole.startswith(known) and HALF not in whole[-1:] + known[-1:]
            return whole[len(known) :] if is_added else self._decoded([token])

        return list(map(added, [one.token_id, *(token for token, _ in one.top)]))

    def _decoded(self, tokens: Sequence[int]) -> str:
        # End tokens are tokens too, though no text shows them.
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def _named(text: str, value: float) -> dict[str, Any]:
    known = None if HALF in text else list(text.encode())
    return {"token": text, "logprob": _finite(value), "bytes": known}


def _finite(value: float) -> float:
    return max(value, LOWEST)
