"""A host's memory behind the device's: what moving caches there costs, and how much of it hides."""

from __future__ import annotations

from dataclasses import dataclass

from pillarattn.theory.capacity import max_sequences
from pillarattn.theory.hardware import Hardware
from pillarattn.theory.links import Link
from pillarattn.theory.model_shape import ModelShape


@dataclass(frozen=True)
class Swap:
    """Moving one sequence's cache to the host and back.

    Attributes:
        bytes: of its cache.
        seconds: one way.
        hidden_steps: steps of decoding that one way takes; while at most this much of the link is
            used, moving costs nothing.
        recompute_seconds: what dropping the cache and running the prompt pass again would cost.
    """

    bytes: float
    seconds: float
    hidden_steps: float
    recompute_seconds: float

    @property
    def pays(self) -> bool:
        """Whether fetching a cache back takes less time than computing it again."""
        return self.seconds < self.recompute_seconds


def swap(
    shape: ModelShape,
    length: int,
    *,
    link: Link,
    step_seconds: float,
    recompute_seconds: float = float("inf"),
) -> Swap:
    """Return what it takes to move the cache of one sequence of `length` tokens.

    Args:
        shape: the model, or a rank's share of it.
        length: tokens in the cache.
        link: between device and host, each way on its own.
        step_seconds: of one decoding step, under which the transfer hides.
        recompute_seconds: of a prompt pass over as many tokens.
    """
    if step_seconds <= 0:
        raise ValueError(f"step_seconds must be positive, got {step_seconds}")
    moved = shape.cache_bytes(length)
    seconds = link.send(moved)
    return Swap(moved, seconds, seconds / step_seconds, recompute_seconds)


def spilled_bytes_per_step(shape: ModelShape, batch: int, tokens_per_step: float) -> float:
    """Return the bytes that must leave the device in each step once its memory is full.

    `batch` sequences grow by `tokens_per_step` tokens each.
    """
    return batch * tokens_per_step * shape.kv_bytes_per_token


def hides(
    shape: ModelShape, batch: int, *, tokens_per_step: float, step_seconds: float, link: Link
) -> bool:
    """Whether a full device can push out what it writes within the time of its own steps."""
    spilled = spilled_bytes_per_step(shape, batch, tokens_per_step)
    return spilled <= link.bandwidth * step_seconds


def sequences_with_host(
    shape: ModelShape, hardware: Hardware, length: int, *, host_memory: float, k: int = 0
) -> tuple[int, int]:
    """Return how many sequences of `length` tokens fit on the device, and how many with the host.

    Args:
        host_memory: bytes of the host that caches may take.
        k: drafts a round; what only they need stays on the device.
    """
    if host_memory < 0:
        raise ValueError(f"host_memory must be >= 0, got {host_memory}")
    on_device = max_sequences(shape, hardware, length, k=k)
    each = shape.cache_bytes(length)
    return on_device, on_device + (int(host_memory // each) if each else 0)
