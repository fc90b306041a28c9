"""Read the rows of a data set: a local JSON Lines file, or anything that `datasets` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pillarattn.evaluation.tasks.base import Task

INSTALL = "pip install 'pillarattn[eval]'"
LOCAL_SUFFIXES = (".jsonl", ".json", ".txt")


def load_rows(
    task: Task,
    data: str | None = None,
    *,
    count: int,
    start: int = 0,
    subset: str | None = None,
    split: str | None = None,
) -> list[Mapping[str, Any]]:
    """Return rows `start` to `start + count - 1` of a task's data.

    Args:
        data: a local JSONL file, a folder that holds `TASK.jsonl`, or what `datasets` takes (a hub
            name, another folder); None for the task's own.
        count: rows wanted; fewer come back where the data ends.
        subset, split: of a hub data set; None for the task's own.

    Raises:
        ValueError: no row is left at `start`, or a line is no JSON object.
        FileNotFoundError: `data` looks like a local file and is none.
        ModuleNotFoundError: `datasets` is needed and not installed.
    """
    if data is not None and (Path(data) / f"{task.name}.jsonl").is_file():
        data = str(Path(data) / f"{task.name}.jsonl")
    if data is None and task.source is None:
        rows: Sequence[Mapping[str, Any]] = task.generate_rows(start + count)[start:]
    elif data is not None and (Path(data).is_file() or data.endswith(LOCAL_SUFFIXES)):
        rows = _read_local(Path(data), start, count)
    else:
        rows = _read_hub(task, data, start, count, subset, split)
    if not rows:
        raise ValueError(f"task {task.name!r}: {data or task.source!r} has no row {start}")
    return list(rows[:count])


def _read_local(path: Path, start: int, count: int) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"data file {str(path)!r} does not exist")
    if path.suffix == ".txt":
        return [{"text": path.read_text(encoding="utf-8")}][start:]
    rows = []
    with path.open(encoding="utf-8") as lines:
        filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for number, line in islice(filled, start, start + count):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object but {line[:40]!r}")
            rows.append(row)
    return rows


def _read_hub(
    task: Task, data: str | None, start: int, count: int, subset: str | None, split: str | None
) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"task {task.name!r} loads {data or task.source!r} with the package 'datasets'; "
            f"install it with: {INSTALL}"
        ) from None
    try:
        if data is None and task.files:
            # Repositories with a loading script are read by their files: scripts no longer run.
            files = [f"hf://datasets/{task.source}/{name}" for name in task.files]
            stream = load_dataset("json", data_files=files, split="train", streaming=True)
        else:
            own = data is None
            stream = load_dataset(
                data or task.source,
                subset or (task.subset if own else None),
                split=split or (task.split if own else "train"),
                streaming=True,
            )
        return list(islice(stream, start, start + count))
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"could not load {data or task.source!r} for task {task.name!r}: {error}. "
            "Without a network, give a local JSONL file as data"
        ) from None
