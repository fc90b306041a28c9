"""Compiles the kernels of a benchmark in several processes before anything is timed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from pillarattn.evaluation.kernel_bench_cells import Cell, DraftCell, VerifyCell

SMALL_BATCH = 2
SMALL_LENGTH = 1024
# Long enough for several stretches of its selection.
SMALL_DRAFT_LENGTH = 16384

Job = tuple[Cell, Any]


def compile_ahead(cells: Sequence[Cell], *, sweep: bool, workers: int) -> None:
    """Run every choice once on small tensors, so that Triton's disk cache holds its code.

    A choice that fails is left to the benchmark, which reports it.
    """
    jobs: dict[str, Job] = {}
    for cell in cells:
        for tiles in [None, *(cell.choices() if sweep else ())]:
            job = small_job(cell, tiles)
            jobs.setdefault(repr(job), job)
    todo = list(jobs.values())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        # Neighbours in the list are alike: the slow ones go to different workers.
        list(pool.map(_compile, todo[::3] + todo[1::3] + todo[2::3]))


def small_job(cell: Cell, tiles: Any) -> Job:
    """Return a small cell and tiles that Triton compiles the same code for.

    The same heads and rows; sizes that are multiples of 16 where the large ones are; and one split
    where the large cell has one.
    """
    if isinstance(cell, VerifyCell):
        if tiles is not None:
            # Without a given split, a large batch has one split and a batch of 1 several.
            several = tiles.split is not None or cell.batch == 1
            tiles = replace(tiles, split=SMALL_LENGTH // 2 if several else SMALL_LENGTH)
        return replace(cell, batch=SMALL_BATCH, length=SMALL_LENGTH), tiles
    if isinstance(cell, DraftCell):
        return replace(cell, batch=SMALL_BATCH, length=SMALL_DRAFT_LENGTH, ragged=False), tiles
    # A selection keeps its length: the columns of a step may follow from it.
    return replace(cell, batch=SMALL_BATCH), tiles


def _compile(job: Job) -> None:
    cell, tiles = job
    try:
        cell.call(cell.sample(), tiles)()
    except Exception:
        return
