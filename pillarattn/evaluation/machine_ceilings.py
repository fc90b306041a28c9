"""The two ceilings of the machine at hand, measured: reading memory, and multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from pillarattn.evaluation.demo_model import resolve_device, resolve_dtype
from pillarattn.evaluation.environment import cpu_name, machine
from pillarattn.theory import Hardware, custom_hardware

# What stands for the memory of a machine that does not say: no result depends on it but capacity.
UNKNOWN_MEMORY = 16e9


def measure_ceilings(
    device: str | torch.device = "auto",
    *,
    dtype: str | torch.dtype = "float32",
    megabytes: int = 256,
    size: int = 1024,
    repeats: int = 5,
) -> Hardware:
    """Measure a roofline's two ceilings with torch's own operations, on the threads it now uses.

    The best of `repeats` counts, since other processes can only slow a ceiling down. Bandwidth is
    the faster of a sum and a matrix-vector product over one large array.

    Args:
        device: "auto" (CUDA where there is one), or a torch device.
        dtype: of the model that is to be compared.
        megabytes: size of the array; make it several times the largest cache.
        size: rows and columns of the matrices.
        repeats: runs of each, after one that warms up.

    Raises:
        ValueError: unknown device or dtype, or a size below 1.
    """
    for name, value in (("megabytes", megabytes), ("size", size), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    where, precision = resolve_device(device), resolve_dtype(dtype)
    options: dict[str, Any] = {"device": where, "dtype": precision}
    columns = 1024
    rows = max(1, megabytes * 2**20 // (columns * precision.itemsize))
    array, vector = torch.ones(rows, columns, **options), torch.ones(columns, **options)
    matrix = torch.ones(size, size, **options)
    read = min(
        _seconds(lambda: array.sum(), where, repeats),
        _seconds(lambda: array @ vector, where, repeats),
    )
    multiplied = _seconds(lambda: matrix @ matrix, where, repeats)
    return custom_hardware(
        _name(where),
        bandwidth=array.numel() * precision.itemsize / read,
        flops=2 * size**3 / multiplied,
        memory=_memory(where),
    )


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the least time of one call."""
    times = []
    for _ in range(repeats + 1):
        begun = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - begun)
    return min(times[1:])


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(machine()["memory_bytes"] or UNKNOWN_MEMORY)
