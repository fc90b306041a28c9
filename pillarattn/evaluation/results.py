"""Results as JSON Lines: one record a run, written whole, read back even after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

RECORD_SCHEMA = 1
KIND = "evaluation"
SHARDS = "shards"
MERGED = "results.jsonl"


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append one record as a line and force it to the disk.

    A half-written last line, which a crash leaves, is cut off first. One process at a time may
    write to a file.
    """
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    line = _to_json(record).encode() + b"\n"
    with where.open("ab+") as file:
        _cut_half_line(file)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file, or of a sweep's folder.

    In a folder the newest successful record of each hash counts, a failed one only where none
    succeeded. A half-written last line is left out.

    Raises:
        FileNotFoundError: there is no such file or folder, or the folder holds no results.
        ValueError: a line is no record; the message names file and line.
    """
    where = Path(path)
    if not where.exists():
        raise FileNotFoundError(f"no results at {str(where)!r}")
    if not where.is_dir():
        return _read_file(where)
    files = result_files(where)
    if not files:
        raise FileNotFoundError(f"{str(where)!r} holds neither {MERGED} nor {SHARDS}/*.jsonl")
    return latest(record for file in files for record in _read_file(file))


def result_files(folder: Path) -> list[Path]:
    """Return a sweep's merged file and its shards, those that exist."""
    merged = folder / MERGED
    return [*([merged] if merged.is_file() else []), *sorted((folder / SHARDS).glob("*.jsonl"))]


def latest(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record a hash, in the order of their first appearance; see `read_records`."""
    chosen: dict[str, dict[str, Any]] = {}
    for record in records:
        before = chosen.get(record["hash"])
        if before is None or _rank(record) >= _rank(before):
            chosen[record["hash"]] = record
    return list(chosen.values())


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these records, at once: readers see the old file or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(_to_json(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def _to_json(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return `value` with null for what JSON has no number for: infinities and NaN."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _rank(record: Mapping[str, Any]) -> tuple[bool, str]:
    return record.get("status") == "ok", str(record.get("started_at", ""))


def parse_records(text: bytes, path: Path, *, first_line: int = 1) -> list[dict[str, Any]]:
    """Return the JSON objects of whole lines; what follows the last line break is left out.

    Raises:
        ValueError: a line is no JSON object; the message names file and line.
    """
    records = []
    for number, line in enumerate(text.split(b"\n")[:-1], first_line):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        records.append(record)
    return records


def _read_file(path: Path) -> list[dict[str, Any]]:
    records = parse_records(path.read_bytes(), path)
    for number, record in enumerate(records, 1):
        if record.get("kind") != KIND or "hash" not in record or "config" not in record:
            raise ValueError(f"{path}, record {number}: not a record of an evaluation")
        if record.get("schema", 0) > RECORD_SCHEMA:
            raise ValueError(
                f"{path}, record {number}: its schema {record['schema']} is newer than "
                f"{RECORD_SCHEMA}; update pillarattn to read it"
            )
    return records


def _cut_half_line(file: Any) -> None:
    """Cut a binary file, open for appending, after its last line break."""
    end = file.seek(0, os.SEEK_END)
    step, keep = 1 << 16, end
    while keep:
        start = max(0, keep - step)
        file.seek(start)
        place = file.read(keep - start).rfind(b"\n")
        if place >= 0:
            keep = start + place + 1
            break
        keep = start
    if keep != end:
        file.truncate(keep)
