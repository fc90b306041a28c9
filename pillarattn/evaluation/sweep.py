"""Run many configs: resumed by hash, one failure does not end it, work spread over processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pillarattn.evaluation.eval_config import EvalConfig
from pillarattn.evaluation.results import (
    KIND,
    MERGED,
    RECORD_SCHEMA,
    SHARDS,
    append_record,
    latest,
    read_records,
    result_files,
    write_records,
)
from pillarattn.evaluation.runner import Runner, provenance

ERROR_CHARACTERS = 2000
# The same variables, and in the same order, that accelerate reads.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_WORLD = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK",
          "MV2_COMM_WORLD_LOCAL_RANK")  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """One process of a sweep: its rank among `world` processes, and its GPU (None: no own)."""

    rank: int = 0
    world: int = 1
    device: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Worker:
        """Read the variables that `accelerate launch`, `torchrun` and `mpirun` set.

        Raises:
            ValueError: a value is no integer, or the rank is not below the world size.
        """
        values = os.environ if environment is None else environment
        rank = _number(values, _RANK, 0)
        world = _number(values, _WORLD, 1)
        local = _number(values, _LOCAL, rank)
        if not 0 <= rank < max(world, 1):
            raise ValueError(f"the rank must be below the world size, got {rank} of {world}")
        import torch

        gpus = torch.cuda.device_count()
        device = f"cuda:{local % gpus}" if world > 1 and gpus else None
        return cls(rank, max(world, 1), device)

    def share(self, configs: Sequence[EvalConfig]) -> list[EvalConfig]:
        """Return this worker's cells: every `world`-th, so that no two workers need to talk.

        Cells that need the same model and prompts are handed out in one run, one after another.
        """
        return list(configs[self.rank :: self.world])


class Listener(Protocol):
    """Is told how a sweep goes on; every method may do nothing."""

    def plan(self, todo: int, done: int) -> None:
        """Take the number of cells to run now, and of those that were there already."""

    def begin(self, config: EvalConfig) -> None:
        """Take the cell that starts."""

    def batch(self, done: int, total: int) -> None:
        """Take the batches of the current cell that are done."""

    def end(self, record: Mapping[str, Any]) -> None:
        """Take the record of the cell that has ended, well or not."""


def run_sweep(
    configs: Sequence[EvalConfig],
    folder: str | Path,
    *,
    worker: Worker | None = None,
    runner: Runner | None = None,
    listener: Listener | None = None,
    retry_failed: bool = True,
) -> list[dict[str, Any]]:
    """Run the configs that `folder` holds no result for; return the records of all of them.

    Each worker appends to a file of its own under `folder/shards`. When it ends, however it ends,
    it merges all shards into `folder/results.jsonl`. What a worker had not finished when it was
    lost is run by the next call.

    Args:
        configs: the cells, the same list in every worker.
        worker: None reads rank and world size from the environment.
        runner: None makes one.
        listener: is told of progress.
        retry_failed: run cells again whose record is an error.

    Raises:
        ValueError: `configs` is empty, or a file in `folder` cannot be read.
    """
    if not configs:
        raise ValueError("a sweep needs at least one cell")
    worker = worker or Worker.from_environment()
    where = Path(folder)
    (where / SHARDS).mkdir(parents=True, exist_ok=True)
    shard = where / SHARDS / f"rank-{worker.rank:03d}.jsonl"
    finished = {
        record["hash"]
        for record in (read_records(where) if result_files(where) else [])
        if record["status"] == "ok" or not retry_failed
    }
    mine = worker.share(configs)
    todo = [config for config in mine if config.hash not in finished]
    runner = runner or Runner(device=worker.device)
    if listener is not None:
        listener.plan(len(todo), len(mine) - len(todo))
    try:
        for config in todo:
            if listener is not None:
                listener.begin(config)
            record = run_cell(runner, config, None if listener is None else listener.batch)
            append_record(shard, record)
            if listener is not None:
                listener.end(record)
    finally:
        merged = merge(where)
    wanted = {config.hash: number for number, config in enumerate(configs)}
    return sorted(
        (record for record in merged if record["hash"] in wanted),
        key=lambda record: wanted[record["hash"]],
    )


def run_cell(
    runner: Runner, config: EvalConfig, on_batch: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return the record of one cell; an exception becomes a record with its text."""
    started, begun = datetime.now(UTC), time.perf_counter()
    try:
        return runner.run(config, on_batch=on_batch)
    except Exception as error:
        if not isinstance(error, (ValueError, OSError, ImportError)):
            # Out of memory, for one: the next cell may be smaller, and needs all of it.
            runner.forget()
        return {
            "schema": RECORD_SCHEMA,
            "kind": KIND,
            "hash": config.hash,
            "label": config.label,
            "status": "failed",
            "config": config.to_dict(),
            "error": f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS],
            **provenance("cpu", config.seed, started, begun),
        }


def merge(folder: Path) -> list[dict[str, Any]]:
    """Write all shards of a sweep into one file and return its records.

    Workers that end at the same time take turns, so that the last one to merge has seen all.
    """
    with (folder / ".merge-lock").open("w") as lock:
        _wait_for(lock)
        records = read_records(folder) if result_files(folder) else []
        write_records(folder / MERGED, records)
    return latest(records)


def _number(values: Mapping[str, str], names: Sequence[str], default: int) -> int:
    """Return the first of the variables that is set."""
    name = next((name for name in names if name in values), None)
    if name is None:
        return default
    try:
        return int(values[name])
    except ValueError:
        raise ValueError(f"the variable {name} must be an integer, got {values[name]!r}") from None


def _wait_for(file: Any) -> None:
    """Hold an exclusive lock until the file is closed, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX)
