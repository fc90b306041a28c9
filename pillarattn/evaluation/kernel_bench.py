"""Benchmark of the Triton kernels: correctness first, then time against this card's ceiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.kernel_bench_cells import SHAPES, Cell, cells
from pillarattn.evaluation.kernel_bench_compile import compile_ahead
from pillarattn.evaluation.kernel_bench_mixed import MixedCell, ScoredMixedCell
from pillarattn.evaluation.kernel_bench_rivals import rivals
from pillarattn.evaluation.kernel_bench_sampling import (
    VOCABULARIES,
    GumbelCell,
    KeyedCell,
    RejectionCell,
)
from pillarattn.evaluation.kernel_bench_selection import (
    HIDDEN,
    LayerOpsCell,
    MassCell,
    MomentsCell,
    PoolCell,
    PooledCell,
)
from pillarattn.evaluation.kernel_bench_timing import (
    Call,
    ReadCeiling,
    Timing,
    matrix_teraflops,
    time_calls,
)

SCHEMA = 1
# bf16 rounding of outputs and weights, fp32 sums; a wrong kernel is off by orders of magnitude.
MOST_ERROR = {
    "verify_attention": 5e-3, "draft_attention": 5e-3, "mixed_attention": 5e-3,
    "topk_select": 0.0, "pooled_select": 0.0, "forecast_mass": 1e-4, "forecast_moments": 1e-4,
    "pool_layers": 1e-5, "layer_ops": 5e-3,
    "gumbel_argmax": 0.0, "rejection_sample": 0.0, "keyed_rejection": 0.0,
}  # fmt: skip
OPS = tuple(MOST_ERROR)

Record = dict[str, Any]


def check_ready(ops: tuple[str, ...]) -> None:
    """Raise `ValueError` unless this machine can run the benchmark of `ops`."""
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise ValueError(f"unknown op {unknown[0]!r}; choose among {', '.join(OPS)}")
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs an NVIDIA GPU, and PyTorch finds none here")


def bench_kernels(
    ops: tuple[str, ...] = OPS,
    *,
    sweep: bool = True,
    quick: bool = False,
    seconds: float = 480.0,
    workers: int = 8,
    emit: Callable[[Record], None],
) -> None:
    """Check and time `ops` cell by cell, and give every record to `emit` as soon as it exists.

    The first record describes the machine and its ceilings. Each cell gives one record per choice
    of tiles, and one per rival that is installed. A choice whose output is wrong is not timed.

    Args:
        ops: some of `OPS`.
        sweep: try every choice of tiles; False times only the default.
        quick: one shape an op.
        seconds: no cell is begun after this long.
        workers: processes that compile the kernels ahead of the timing; 0 compiles as it goes.
        emit: takes one record, ready for JSON.

    Raises:
        ValueError: an unknown op, or no GPU.
    """
    check_ready(ops)
    begun = time.monotonic()
    todo = [*cells(ops, quick=quick), *_further_cells(ops, quick=quick)]
    if workers:
        compile_ahead(todo, sweep=sweep, workers=workers)
    ceiling = ReadCeiling()
    emit(
        {
            "schema": SCHEMA,
            "kind": "machine",
            **environment("cuda"),
            "commit": source_commit(),
            "compile_seconds": time.monotonic() - begun,
            "read_tbps": ceiling.terabytes_per_second(),
            "matmul_tflops": matrix_teraflops(),
        }
    )
    for cell in todo:
        if time.monotonic() - begun > seconds:
            emit(_head(cell) | {"skipped": f"no cell is begun after {seconds:g} s"})
            continue
        for record in _cell_records(cell, ceiling, sweep=sweep):
            emit(record | {"elapsed_seconds": round(time.monotonic() - begun, 1)})
        torch.cuda.empty_cache()


def _further_cells(ops: tuple[str, ...], *, quick: bool) -> Iterator[Cell]:
    """Return the cells of mixed attention, the forecast's selection, a layer's ops and sampling."""
    for batch, length in SHAPES[:1] if quick else SHAPES:
        if batch > 1 and MixedCell.op in ops:
            yield MixedCell(batch, length)
            yield ScoredMixedCell(batch, length)
    several = ((PooledCell, 32), (MassCell, 1152), (MomentsCell, 1152), (PoolCell, 32))
    for kind, rows in several:
        if kind.op in ops:
            yield kind(rows, 16384)
            if not quick:
                yield kind(max(1, rows // 32), 16384)
    if LayerOpsCell.op in ops:
        for rows in (288,) if quick else (16, 64, 288):
            yield LayerOpsCell(rows, HIDDEN)
    for size in VOCABULARIES[-1:] if quick else VOCABULARIES:
        if GumbelCell.op in ops:
            for rows in (288,) if quick else (16, 288):
                yield GumbelCell(rows, size)
                yield GumbelCell(rows, size, "bfloat16")
        if RejectionCell.op in ops:
            for batch in (32,) if quick else (16, 32, 288):
                yield RejectionCell(batch, size)
        if KeyedCell.op in ops:
            for batch in (32,) if quick else (16, 32):
                yield KeyedCell(batch, size)


def _head(cell: Cell) -> Record:
    return {"schema": SCHEMA, "kind": "cell", "op": cell.op, "shape": cell.shape}


def _cell_records(cell: Cell, ceiling: ReadCeiling, *, sweep: bool) -> Iterator[Record]:
    inputs = cell.inputs()
    matched = ceiling.terabytes_per_second(cell.bytes)
    whole = ceiling.terabytes_per_second()

    def timed(timing: Timing) -> Record:
        speed = cell.bytes / timing.median_us * 1e-6
        return {
            **asdict(timing),
            "bytes": cell.bytes,
            "tbps": speed,
            "matched_tbps": matched,
            "share_of_matched": speed / matched,
            "share_of_ceiling": speed / whole,
        }

    for tiles in [None, *(cell.choices() if sweep else ())]:
        record = _head(cell) | {"implementation": "triton"}
        record["tiles"] = None if tiles is None else asdict(tiles)
        try:
            error = cell.error(inputs[0], tiles)
            record["error"] = error
            # Written so that a NaN fails too.
            if not error <= MOST_ERROR[cell.op]:
                yield record | {"failed": f"error {error:.3g} over {MOST_ERROR[cell.op]:g}"}
                continue
            calls = [cell.call(given, tiles) for given in inputs]
            yield record | timed(time_calls(calls))
        except Exception as fault:  # A choice that does not fit the card must not end the run.
            yield record | {"failed": _line(fault)}
    for name, make in rivals(cell):
        record = _head(cell) | {"implementation": name}
        try:
            yield record | timed(_time_rival([make(given) for given in inputs]))
        except ImportError:
            yield record | {"failed": "not installed"}
        except Exception as fault:
            yield record | {"failed": _line(fault)}


def _time_rival(calls: list[Call]) -> Timing:
    try:
        return time_calls(calls)
    except RuntimeError:
        # Some allocate or synchronise in ways that a graph cannot hold.
        torch.cuda.synchronize()
        return time_calls(calls, graph=False)


def _line(fault: Exception) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:300]


def best_records(records: list[Record]) -> list[Record]:
    """Return the fastest record of each cell and implementation, in the order they first came."""
    best: dict[str, Record] = {}
    for record in records:
        if record.get("kind") != "cell" or "median_us" not in record:
            continue
        key = f"{record['op']} {record['shape']} {record['implementation']}"
        if key not in best or record["median_us"] < best[key]["median_us"]:
            best[key] = record
    return list(best.values())
