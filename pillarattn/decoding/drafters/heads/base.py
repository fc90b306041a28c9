"""The one interface of draft heads: EAGLE-3, multi-token prediction, or a researcher's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pillarattn.decoding.target import WatchedTarget
from pillarattn.modules.cache import ContiguousCache


@dataclass
class HeadStep:
    """What a head may use in one forward.

    Attributes:
        target: gives embeddings of tokens, and logits of final states.
        cache: the head's own, at the length before this forward; its attention appends to it.
        positions: `[B, Q]`, place of each feature's token in its row's text.
    """

    target: WatchedTarget
    cache: ContiguousCache
    positions: Tensor


class DraftHead(Protocol):
    """A small network that goes on from the target's hidden states.

    Place t of a row pairs the feature of token t with the token after it, t + 1, and predicts token
    t + 2. The features of verified tokens come from the target (`fuse` of its hidden states); those
    of drafted tokens are what the head itself returned for the place before.

    A head has no state besides `HeadStep.cache`, so that one object serves many generations.
    """

    @property
    def cache_layers(self) -> int:
        """Attention layers of the head."""
        ...

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the hidden states to read of a target: i is what layer i gets, and `num_layers`
        what the last one gives, after the final norm."""
        ...

    def fuse(self, states: Tensor) -> Tensor:
        """Turn hidden states `[B, Q, n * D]`, side by side, into features `[B, Q, F]`."""
        ...

    def forward(self, features: Tensor, tokens: Tensor, step: HeadStep) -> tuple[Tensor, Tensor]:
        """Return logits `[B, Q, V]` and the next features `[B, Q, F]`.

        Args:
            features: `[B, Q, F]`.
            tokens: `[B, Q]`, the token after each feature's.
            step: what else there is.
        """
        ...


def take_columns(states: Tensor, columns: Tensor) -> Tensor:
    """Return `states[b, columns[b]]` as `[B, 1, F]`."""
    index = columns.view(-1, 1, 1).expand(-1, 1, states.shape[-1])
    return torch.gather(states, 1, index)
