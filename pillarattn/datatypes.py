"""Plain data that the layers of the library hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Phase(Enum):
    """What one forward pass is for."""

    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"


def on_device(values: Any, device: torch.device | str) -> Tensor:
    """Return integers of the host as an int64 tensor, without waiting for a CUDA device."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    # From pageable memory the copy would wait until all that was queued before it is done. The
    # default device may be another than the host.
    on_host = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True)
    return on_host.to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host: nobody waits for what is queued after the copy.

    Args:
        tensor: on any device; it may be written to once this is made.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if tensor.is_cuda:
            self._held = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            self._held.copy_(tensor, non_blocking=True)
            event: Any = torch.cuda.Event
            self._event = event()
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._held = tensor.to("cpu", copy=True)

    def tolist(self) -> list[Any]:
        """Wait for the copy and return its values."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._held.tolist()
        return values


@dataclass(frozen=True)
class Selection:
    """The keys that draft attention reads in one layer, besides the tail written since.

    Attributes:
        indices: `[B, Hkv, N]` int32, logical positions, ascending; unused past `counts`.
        counts: `[B, Hkv]` int32, how many entries of each row are used.
        tail_start: `[B]` int64, length when the keys were chosen; later positions are read too.
    """

    indices: Tensor
    counts: Tensor
    tail_start: Tensor


class RowLengths:
    """Immutable lengths of the rows of a cache, on the host and on the device at once.

    Every layer of a cache refers to the same object, so that growing or rolling back a cache costs
    one small tensor however many layers and tokens it holds.
    """

    __slots__ = ("_next", "device", "host", "tensor")

    def __init__(
        self,
        lengths: list[int] | tuple[int, ...],
        device: torch.device | str,
        *,
        tensor: Tensor | None = None,
    ) -> None:
        self.host: tuple[int, ...] = tuple(int(n) for n in lengths)
        self.device = torch.device(device)
        if tensor is None:
            tensor = on_device(self.host, self.device)
        self.tensor: Tensor = tensor
        self._next: dict[int, RowLengths] = {}

    @property
    def max(self) -> int:
        """The longest row, in tokens."""
        return max(self.host, default=0)

    @property
    def min(self) -> int:
        """The shortest row, in tokens."""
        return min(self.host, default=0)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same length."""
        return self.max == self.min

    def plus(self, tokens: int) -> RowLengths:
        """Lengths after `tokens` more tokens in every row; the layers of a forward share them."""
        if tokens not in self._next:
            # Computed where they are: a copy from the host would wait for the device.
            self._next[tokens] = type(self)(
                [n + tokens for n in self.host], self.device, tensor=self.tensor + tokens
            )
        return self._next[tokens]

    def __repr__(self) -> str:
        return f"RowLengths({list(self.host)})"

    def __reduce__(self) -> tuple[type[RowLengths], tuple[tuple[int, ...], str]]:
        return RowLengths, (self.host, str(self.device))


class LiveLengths(RowLengths):
    """Lengths that only the device knows, of which the host has an upper bound.

    A pass that is replayed on other lengths than it was recorded with reads them from `tensor`.
    """

    __slots__ = ()

    @property
    def is_uniform(self) -> bool:
        """False: nothing may follow from the bound."""
        return False

    def forget_later(self) -> None:
        """Compute lengths after more tokens anew: `tensor` was written to."""
        self._next.clear()


@dataclass
class Draft:
    """Tokens that a drafter proposes in one round.

    Attributes:
        tokens: `[B, k]` int64.
        probs: `[B, k, V]`, what each token was sampled from (None: chosen without chance).
        lengths: `[B]` int64, tokens that each row really proposes, 0..k; what follows them is
            filler that no rule may accept. None: k in every row.
        passes: one list a forward pass of the target that drafting took: by row, how many tokens
            past the committed ones it had in the cache. Statistics count keys by it.
    """

    tokens: Tensor
    probs: Tensor | None = None
    lengths: Tensor | None = None
    passes: list[list[int]] = field(default_factory=list)

    @property
    def k(self) -> int:
        """Columns of the draft: tokens of the row that proposes most."""
        return int(self.tokens.shape[1])

    def proposed(self) -> list[int]:
        """Return how many tokens each row proposes; waits for the device if rows differ."""
        if self.lengths is None:
            return [self.k] * self.tokens.shape[0]
        return [int(n) for n in self.lengths.tolist()]


@dataclass
class Verdict:
    """What an acceptance rule makes of a draft.

    Attributes:
        accepted: one int a row, drafts accepted (0..k).
        next_tokens: `[B]` int64, the token after the accepted drafts (recovered or bonus); -1
            where no token is possible.
    """

    accepted: list[int]
    next_tokens: Tensor


@dataclass
class Generation:
    """The result of one decoding run, before it takes a Hugging Face shape.

    Attributes:
        sequences: `[B, T]` int64, prompt and new tokens, finished rows padded.
        scores: processed logits `[B, V]` fp32 of each new token, or None.
        logits: raw logits `[B, V]` fp32 of each new token, or None.
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
