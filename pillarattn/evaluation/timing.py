"""Time one `generate` call: prefill and decode apart, by watching when tokens arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class RunTimes:
    """How long one generation of one prompt took.

    Attributes:
        prefill_seconds: from the call to the first new token.
        decode_seconds: from the first new token to the last.
        new_tokens: tokens generated, the first included.
    """

    prefill_seconds: float
    decode_seconds: float
    new_tokens: int

    @property
    def total_seconds(self) -> float:
        """Prefill and decode together."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens after the first, per second of decode; 0 if there are none."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, derived ones included."""
        return asdict(self) | {
            "total_seconds": self.total_seconds,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


class TimingStreamer(BaseStreamer):
    """Notes when the first new token arrives and how many follow, and passes all on.

    Args:
        inner: a streamer that gets every call too, such as one that prints; its own time counts.
    """

    def __init__(self, inner: BaseStreamer | None = None) -> None:
        self.inner = inner
        self.first_token_at: float | None = None
        self.new_tokens = 0
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take the prompt `[1, T]` first, then new tokens in any shape."""
        if self._prompt_seen:
            if self.first_token_at is None:
                self.first_token_at = perf_counter()
            self.new_tokens += value.numel()
        self._prompt_seen = True
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """Pass the end on."""
        if self.inner is not None:
            self.inner.end()


def timed_generate(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    streamer: BaseStreamer | None = None,
    **options: Any,
) -> tuple[Tensor, RunTimes]:
    """Generate for one prompt; return `[1, T]` sequences and the times.

    Raises:
        ValueError: more than one prompt (streamers, and so these times, are for one).
    """
    rows = inputs["input_ids"].shape[0]
    if rows != 1:
        raise ValueError(f"timing is for one prompt at a time, got a batch of {rows}")
    watch = TimingStreamer(streamer)
    _synchronise(model)
    started = perf_counter()
    result = model.generate(**inputs, streamer=watch, **options)
    _synchronise(model)
    ended = perf_counter()
    sequences = result if isinstance(result, Tensor) else result.sequences
    first = watch.first_token_at if watch.first_token_at is not None else ended
    return sequences, RunTimes(first - started, ended - first, watch.new_tokens)


def _synchronise(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
