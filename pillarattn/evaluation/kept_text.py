"""The text that a trace followed, token by token, with how often each token was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pillarattn.evaluation.selection_trace import SelectionTrace

# What a picture can hold, and what a record should.
MOST_TOKENS = 1000


@dataclass(frozen=True)
class KeptText:
    """A stretch of text and the keys that a strategy kept in it.

    Attributes:
        strategy: the strategy's name.
        texts: the text of each token; joined, they are the text.
        share: share of the choices made after a token was written that kept it, a mean over layers
            and KV heads; 0..1.
        first: position of the first token in its sequence.
        prompt_tokens: length of the prompt.
        choices: how often keys were chosen.
    """

    strategy: str
    texts: list[str]
    share: list[float]
    first: int
    prompt_tokens: int
    choices: int

    @classmethod
    def from_trace(
        cls, trace: SelectionTrace, tokenizer: Any, *, start: int = 0, end: int | None = None
    ) -> KeptText:
        """Return the tokens `start` to `end - 1` of a trace."""
        texts, share = token_texts(trace, tokenizer)[start:end], trace.kept_share[start:end]
        return cls(trace.strategy, texts, share, start, trace.prompt_tokens, trace.choices)

    @classmethod
    def newest(cls, trace: SelectionTrace, tokenizer: Any) -> KeptText:
        """Return the newest tokens of a trace, as many as a picture can hold."""
        return cls.from_trace(trace, tokenizer, start=max(0, len(trace.tokens) - MOST_TOKENS))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KeptText:
        """Read what `to_dict` returned."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; shares to three digits, which is more than a colour shows."""
        return asdict(self) | {"share": [round(value, 3) for value in self.share]}


def token_texts(trace: SelectionTrace, tokenizer: Any) -> list[str]:
    """Return the text of each token of a trace, so that joining them gives the text.

    A character that spans several tokens is shown with the last of them.
    """
    texts: list[str] = []
    before = shown = 0
    for end in range(1, len(trace.tokens) + 1):
        # Decoded beside the token before it, so that a leading space is not lost.
        old = tokenizer.decode(trace.tokens[before:shown], clean_up_tokenization_spaces=False)
        new = tokenizer.decode(trace.tokens[before:end], clean_up_tokenization_spaces=False)
        if new.endswith("\ufffd"):
            texts.append("")
            continue
        texts.append(new[len(old) :])
        before, shown = shown, end
    return texts
