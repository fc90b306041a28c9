"""Where a request's output ends, asked after every token."""

from __future__ import annotations

from typing import Any

from pillarattn.engine.output_text import OutputText
from pillarattn.engine.request import FinishReason, Request

# Characters at the start of a decoded tail that may not be those of the whole text.
EDGE = 4


class StopCheck:
    """Ends an output at a stop token, a stop string or its length, as plain decoding would.

    Args:
        eos: the model's end-of-sequence tokens.
        tokenizer: turns tokens into text; needed for stop strings.
    """

    def __init__(self, eos: frozenset[int], tokenizer: Any = None) -> None:
        self.eos, self.tokenizer = eos, tokenizer

    def __call__(self, request: Request) -> FinishReason | None:
        """Return why the output ends with its last token, or None if it goes on."""
        params, output = request.params, request.output
        token = output[-1]
        if token in params.stop_token_ids or (token in self.eos and not params.ignore_eos):
            return FinishReason.STOP
        if params.stop and self._find(request) is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= params.max_tokens else None

    def text(self, request: Request) -> str | None:
        """Return the output as text, up to a stop string; None without a tokenizer.

        While the request runs, each call costs as much as what is new.
        """
        if self.tokenizer is None:
            return None
        if request.finish_reason is None:
            request.grown = request.grown or OutputText(self.tokenizer)
            return request.grown.of(request.output)
        text = str(self.tokenizer.decode(request.output, skip_special_tokens=True))
        if request.finish_reason is not FinishReason.STOP:
            return text
        ends = [at for at in map(text.find, request.params.stop) if at >= 0]
        return text[: min(ends)] if ends else text

    def _find(self, request: Request) -> str | None:
        """Return the stop string that the newest tokens complete, if any.

        It may stand in the text that the caller sees, or in that with special tokens.
        """
        stop, output = request.params.stop, request.output
        # The edge may split a character, or lose the space before it.
        enough = max(map(len, stop)) + EDGE
        for skips in (False, True):
            count = enough
            while True:
                tail = str(self.tokenizer.decode(output[-count:], skip_special_tokens=skips))
                if len(tail) >= enough or count >= len(output):
                    break
                # Tokens may have less than a character of text, or none.
                count *= 2
            found = next((text for text in stop if text in tail), None)
            if found is not None:
                return found
        return None
