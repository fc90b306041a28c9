"""Text that appears while the model writes it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from transformers import TextStreamer


class LiveText(TextStreamer):
    """A streamer that writes new text, without the prompt, to a console."""

    def __init__(self, tokenizer: Any, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True)
        self.console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write text as it is: no markup, no wrapping."""
        self.console.file.write(text + ("\n" if stream_end else ""))
        self.console.file.flush()
