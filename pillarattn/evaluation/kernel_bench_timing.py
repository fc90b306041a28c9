"""Time of a GPU kernel without the host: many calls on rotating inputs in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Call = Callable[[], object]

# A sample shorter than this is mostly the resolution of the events.
SAMPLE_SECONDS = 2e-3
# Programs of the read probe: elements per step, steps, warps. The best of them is the ceiling.
READ_CONFIGS = ((2048, 4, 4), (4096, 4, 8), (4096, 8, 8), (8192, 4, 16), (4096, 2, 8))


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median of the samples, the least and the most."""

    median_us: float
    least_us: float
    most_us: float
    samples: int


def time_calls(calls: Sequence[Call], *, samples: int = 11, graph: bool = True) -> Timing:
    """Time `calls`, each on inputs of its own; all run once per replay of one CUDA graph.

    Inputs that rotate through more memory than the L2 cache holds are read from memory each time.

    Args:
        calls: functions without arguments, same work, different inputs.
        samples: replays (or groups of them) that are timed.
        graph: False queues plain calls instead, for code that a graph cannot hold; the host's
            time then counts where it is slower than the device.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    replay = _replay_of(calls, graph)
    replay()
    torch.cuda.synchronize()
    once = _elapsed(replay, 1)
    repeats = max(1, min(64, round(SAMPLE_SECONDS / max(once, 1e-6))))
    times = [_elapsed(replay, repeats) / (repeats * len(calls)) * 1e6 for _ in range(samples)]
    return Timing(median(times), min(times), max(times), samples)


def _replay_of(calls: Sequence[Call], graph: bool) -> Callable[[], None]:
    if not graph:

        def run() -> None:
            for call in calls:
                call()

        return run
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for call in calls:
            call()
    return recorded.replay


def _elapsed(replay: Callable[[], None], repeats: int) -> float:
    """Return seconds on the device for `repeats` replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


class ReadCeiling:
    """The fastest read of a given number of bytes on this card, measured once per size.

    Args:
        pool_bytes: memory that the probe rotates through; also the size of the largest read.
    """

    def __init__(self, pool_bytes: int = 8 << 30) -> None:
        self._pool = torch.empty(pool_bytes // 4, device="cuda").normal_()
        self._sums = torch.empty(pool_bytes // 8192, device="cuda")
        self._known: dict[int, float] = {}

    def terabytes_per_second(self, size: int | None = None) -> float:
        """Return the best bandwidth over reads of about `size` bytes (None: the whole pool)."""
        whole = self._pool.numel() * 4
        size = whole if size is None else min(size, whole)
        if size not in self._known:
            self._known[size] = max(self._measure(size, *config) for config in READ_CONFIGS)
        return self._known[size]

    def _measure(self, size: int, block: int, steps: int, warps: int) -> float:
        from pillarattn.kernels.memory_read.triton_kernel import read_all

        unit = block * steps
        elements = max(1, size // 4 // unit) * unit
        windows = max(1, min(16, self._pool.numel() // elements))

        def call_of(window: int) -> Call:
            part = self._pool[window * elements : (window + 1) * elements]
            return lambda: read_all(part, self._sums, block=block, steps=steps, warps=warps)

        timing = time_calls([call_of(window) for window in range(windows)], samples=7)
        return elements * 4 / timing.median_us * 1e-6


def matrix_teraflops(size: int = 8192) -> float:
    """Return the rate of a bf16 product of random square matrices, in TFLOP/s."""
    left, right = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    timing = time_calls([lambda: left @ right], samples=7)
    return 2 * size**3 / timing.median_us * 1e-6
