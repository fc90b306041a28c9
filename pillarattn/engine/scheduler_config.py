"""Settings of a `Scheduler`, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

ADMISSIONS = ("optimistic", "reserve")


@dataclass(frozen=True)
class SchedulerConfig:
    """Settings of a `Scheduler`.

    Attributes:
        num_blocks: blocks of the device's pool.
        block_size: tokens of a block: 1, 16 or 64.
        host_blocks: blocks of the host's pool; 0 drops victims and computes them again.
        max_batch: requests that are on the device at a time, >= 1.
        prefill_chunk: prompt tokens of a step, over all requests, >= 1.
        phases: "unified" or "lockstep": see `phases`.
        admission: "optimistic" admits what fits now; "reserve" what fits at its full length.
        eviction: "fifo", "lifo", "shortest", "lru" or "heat": see `eviction`.
        offload_chunk: tokens that move to or from the host at a time, >= 1.

    Raises:
        ValueError: a value is out of range.
    """

    num_blocks: int
    block_size: int = 16
    host_blocks: int = 0
    max_batch: int = 64
    prefill_chunk: int = 256
    phases: str = "unified"
    admission: str = "optimistic"
    eviction: str = "lifo"
    offload_chunk: int = 1024

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_batch", "prefill_chunk", "offload_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.admission not in ADMISSIONS:
            raise ValueError(
                f"admission must be one of {', '.join(map(repr, ADMISSIONS))}, "
                f"got {self.admission!r}"
            )
