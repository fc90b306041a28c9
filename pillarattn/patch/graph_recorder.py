"""Recording of CUDA graphs, and what all who replay passes share: a pool, a test, a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

# Largest gap between a replay and the same pass run eagerly, relative to the spread of the logits:
# kernels may split a row at other places. In half precision the root mean square counts.
EXACT_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.12

# PyTorch records one graph at a time in a process; those of other threads wait.
_CAPTURE = Lock()
# One a device, for good: products keep memory of their own for each stream that they ever ran on.
_STREAMS: dict[torch.device, Any] = {}


class GraphRecorder:
    """Records passes into one pool of memory: nothing that a replay leaves outlives the next pass.

    Attributes:
        pool: of all graphs since the last `renew`; it ends with the last of them.
    """

    def __init__(self) -> None:
        self.pool: Any = None

    def renew(self) -> None:
        """Take a new pool for the next graph: all earlier ones are gone."""
        self.pool = None

    def record(self, play: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Record what `play` launches on a device and return its replay."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _CAPTURE:
            if device not in _STREAMS:
                # Of the model's own device: work of another one would not be recorded.
                _STREAMS[device] = torch.cuda.Stream(device)
            with torch.cuda.graph(
                graph,
                pool=self.pool,
                stream=_STREAMS[device],
                capture_error_mode="thread_local",
            ):
                play()
        return graph.replay


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
