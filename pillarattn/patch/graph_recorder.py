"""Recording of CUDA graphs, and what all who replay passes share: a pool, a test, a warning."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

# Largest gap between a replay and the same pass run eagerly, relative to the spread of the logits:
# kernels may split a row at other places. In half precision the root mean square counts.
EXACT_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.12
# What errors say where there was too little memory, PyTorch's own and those of CUDA.
NO_MEMORY = "out of memory", "ALLOC_FAILED"

# PyTorch records one graph at a time in a process; those of other threads wait.
_CAPTURE = Lock()
# One a device, for good: products keep memory of their own for each stream that they ever ran on.
_STREAMS: dict[torch.device, Any] = {}
# Graphs whose capture was invalidated, for good: PyTorch's allocators may still ask them.
_BROKEN: list[Any] = []


class GraphRecorder:
    """Records passes into one pool of memory: nothing that a replay leaves outlives the next pass.

    A recording takes about as long as the pass takes the host. `torch.cuda.graph` would wait for
    the device and give all unused memory back first, which the next eager pass has to ask for
    again; here that happens only where memory runs out.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    def record(self, play: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Record what `play` launches on a device and return its replay.

        `play` is called once more where memory has run out. Errors are its own, or CUDA's; after
        one, other passes can be recorded, and those that were can be replayed.
        """
        with _CAPTURE:
            try:
                return self._capture(play, device)
            except RuntimeError as error:
                if not any(sign in str(error) for sign in NO_MEMORY):
                    raise
            # Only here the error is gone, and with its frames what the pass had allocated.
            gc.collect()
            torch.cuda.empty_cache()
            return self._capture(play, device)

    def _capture(self, play: Callable[[], None], device: torch.device) -> Callable[[], None]:
        if device not in _STREAMS:
            # Of the model's own device: work of another one would not be recorded.
            _STREAMS[device] = torch.cuda.Stream(device)
        stream, current = _STREAMS[device], torch.cuda.current_stream(device)
        if self._pool is None or not self._graphs:
            # A pool ends with the last of its graphs, and PyTorch then takes no more for it.
            self._pool = torch.cuda.graph_pool_handle()
        # What is recorded does not run, but before it PyTorch writes down the state of random
        # numbers, which replays read: earlier ones must be done with it, later ones wait for it.
        stream.wait_stream(current)
        with torch.cuda.stream(stream), _uncollected(), _own_workspace():
            graph = torch.cuda.CUDAGraph()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                play()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, device)
                raise
        current.wait_stream(stream)
        self._graphs.add(graph)
        return graph.replay

    def _abandon(self, graph: Any, device: torch.device) -> None:
        """Leave memory and random numbers usable after a capture that failed."""
        try:
            graph.capture_end()
        except Exception:
            # CUDA has ended it, but PyTorch stops at its error, and would allocate from the pool,
            # keep blocks that other streams have used, and draw no random numbers from then on.
            with suppress(RuntimeError):
                index = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
            self._pool = None
            _BROKEN.append(graph)
            with suppress(Exception):
                _capture_something(device)
        graph.reset()


def _capture_something(device: torch.device) -> None:
    """Record a graph of no use: a capture that ends well makes random numbers run eagerly again."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        torch.zeros(1, device=device)
    finally:
        graph.capture_end()


@contextmanager
def _own_workspace() -> Iterator[None]:
    """Give what is recorded inside a workspace for its matrix products from the pool of its graph.

    PyTorch keeps one for each stream, made by the first product there, and frees it when another
    graph of the stream ends or `torch.compile` records: those that still read it would then read
    memory of others, or none. A block of its own pool stays in place as long as the graph.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python from freeing what nobody reaches: CUDA may not allow that inside a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def rounded(needed: int, least: int) -> int:
    """Return a size that recordings can share, at most `least` or an eighth above `needed`."""
    step = max(least, (1 << max(needed.bit_length() - 1, 0)) // 8)
    return -(-needed // step) * step


def logits_gap(replayed: Tensor, eager: Tensor) -> tuple[float, float]:
    """Return how far two passes' logits are apart, in their spread, and what is allowed of it."""
    is_exact = eager.dtype in (torch.float32, torch.float64)
    gaps = (replayed.float() - eager.float()).abs()
    size = gaps.max() if is_exact else gaps.square().mean().sqrt()
    spread = eager.float().std().clamp_min(1e-6)
    return float(size / spread), EXACT_TOLERANCE if is_exact else COARSE_TOLERANCE


def gap_reason(gap: float, allowed: float) -> str:
    """Say why replays of a kind are not trusted."""
    return (
        f"a replayed pass differs from the same one run eagerly by {gap:.2g} of the logits' spread "
        f"(allowed: {allowed:g})"
    )


def fault_reason(error: Exception) -> str:
    """Say why a pass could not be recorded, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def warn_eager(reason: str) -> None:
    """Tell the user, once a run, that passes are not replayed."""
    warnings.warn(
        f"passes run without CUDA graphs, slower and with the same output: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )
