"""What decoding needs of a model: prefill, a forward over new tokens, and the rules around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.decoding.history import History
from pillarattn.modules.cache import ContiguousCache
from pillarattn.modules.step import StepState


class Target(Protocol):
    """A language model with its cache.

    Attributes:
        lockstep: whether all rows must advance by the same number of tokens in each round, because
            the cache cannot hold rows of different lengths.

    A target whose cache is keys and values alone says so with an attribute `cuts = True`: its
    `roll_back` may then stop at any length of each row, and not only at those of the last `keep`.
    One whose first passes are slower than later ones has a method `take_settled`, which returns
    whether all passes since its last call ran as they will from now on: a gate learns from these.
    One whose passes may have more tokens a row than they are given has an attribute `block_width`:
    how many its last `forward` had.
    One whose passes can be begun before the host knows their tokens has a method
    `forward_ahead(tokens, step)`: it may run the pass of the round after a plain one, `tokens`
    `[B]`, over the cache as the last `forward` has left it. The next `forward` takes what it left
    if it is a pass of that kind. That its tokens are these in all rows of use to anyone, which
    must all have kept the token before, is the caller's word; else it calls `forget_ahead()`.
    """

    lockstep: bool

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

    def roll_back(self, lengths: RowLengths) -> None:
        """Forget all that was appended since the last `keep`; `lengths` are those of that time."""
        ...

    def keep(self, lengths: RowLengths) -> None:
        """Commit the tokens of the last forward up to `lengths`, and forget the others."""
        ...


@dataclass(frozen=True)
class HiddenStates:
    """What a target's layers said in its last pass.

    Attributes:
        states: `[B, Q, n * D]`, the states of the n watched layers side by side; column i of row b
            is the i-th token that the pass put into the row's cache, and padding has left.
        start: where each row's cache ended before the pass.
    """

    states: Tensor
    start: RowLengths


class WatchedTarget(Target, Protocol):
    """A target that lets draft heads see its hidden states and share its vocabulary's weights."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def hidden_states(self) -> HiddenStates:
        """The watched states of the last `prefill` or `forward`; `keep` leaves them alone."""
        ...

    def watch(self, layers: tuple[int, ...]) -> None:
        """Keep the states at these places from the prompt on: i is what layer i gets, and
        `num_layers` what the last one gives, after the final norm."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings `[B, Q, D]` of `tokens`."""
        ...

    def unembed(self, states: Tensor) -> Tensor:
        """Return the logits `[B, Q, V]` of final, normed states."""
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
