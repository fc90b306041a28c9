"""What decoding needs of a model: prefill, a forward over new tokens, and the rules around it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pillarattn.decoding.history import History
from pillarattn.modules.cache import ContiguousCache
from pillarattn.modules.step import StepState


class Target(Protocol):
    """A language model with its cache."""

    @property
    def cache(self) -> ContiguousCache:
        """The cache; its row lengths say where new tokens go."""
        ...

    def prefill(self, step: StepState) -> Tensor:
        """Run the prompt and return the logits after its last token, `[B, V]` fp32."""
        ...

    def forward(self, tokens: Tensor, step: StepState) -> Tensor:
        """Append `tokens` `[B, Q]` to the cache and return their logits, `[B, Q, V]` fp32."""
        ...


class LogitsRule(Protocol):
    """Turns raw logits into those that tokens are chosen from (penalties, temperature, ...)."""

    def __call__(self, history: History, starts: list[int], logits: Tensor) -> Tensor:
        """Process `logits` `[B, Q, V]`; column i of row b follows `ids[b, :starts[b] + i]`."""
        ...


class StopRule(Protocol):
    """Says where each row of a generation ends."""

    pads_finished_rows: bool
    pad_token: int

    def finished(self, history: History, rows: list[int], length: int) -> list[bool]:
        """Whether each of `rows` ends with `length` tokens, by rules that look at one row."""
        ...

    def finished_together(self, history: History, length: int) -> list[bool] | None:
        """The same for every row by rules that look at the whole batch; None: there are none."""
        ...
