"""Time `generate` on a batch: prefill and decode apart, without touching what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchTimes:
    """How long the generation of one batch took.

    Attributes:
        prefill_seconds: from the call to the end of the first forward.
        decode_seconds: the rest.
        new_tokens: one number a row: its tokens, the end token included, padding not.
    """

    prefill_seconds: float
    decode_seconds: float
    new_tokens: tuple[int, ...]

    @property
    def decoded_tokens(self) -> int:
        """Tokens that decoding added after each row's first, which the prefill gives."""
        return sum(max(0, n - 1) for n in self.new_tokens)

    @property
    def total_seconds(self) -> float:
        """Prefill and decode together."""
        return self.prefill_seconds + self.decode_seconds


def timed_batch(
    model: Any, inputs: Mapping[str, Tensor], *, end_tokens: frozenset[int], **options: Any
) -> tuple[Tensor, BatchTimes]:
    """Generate for a batch; return sequences `[B, T]` and the times.

    Args:
        inputs: `input_ids` and `attention_mask`, padded on the left.
        end_tokens: ids that end a row.
        options: of `generate`, `assistant=` included.
    """
    first: list[float] = []

    def note_first_forward(*_: Any) -> None:
        handle.remove()
        _synchronise(model)
        first.append(perf_counter())

    # A streamer could tell the same, but for one prompt only.
    handle = model.register_forward_hook(note_first_forward)
    try:
        _synchronise(model)
        started = perf_counter()
        result = model.generate(**inputs, **options)
        _synchronise(model)
        ended = perf_counter()
    finally:
        handle.remove()
    sequences: Tensor = result if isinstance(result, Tensor) else result.sequences
    new = sequences[:, inputs["input_ids"].shape[1] :]
    middle = first[0] if first else ended
    return sequences, BatchTimes(middle - started, ended - middle, row_tokens(new, end_tokens))


def row_tokens(new: Tensor, end_tokens: frozenset[int]) -> tuple[int, ...]:
    """Return each row's new tokens up to and including its first end token."""
    counts = []
    for row in new.tolist():
        place = next((i for i, token in enumerate(row) if token in end_tokens), None)
        counts.append(len(row) if place is None else place + 1)
    return tuple(counts)


def _synchronise(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
