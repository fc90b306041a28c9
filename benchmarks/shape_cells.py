"""Cells of a benchmark of shapes: their variants one after the other, each with its record.

A record is written as soon as its variant is done. A variant that does not fit or fails is named in
its record, and the others go on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pillarattn.evaluation.results import append_record

Record = dict[str, Any]


def measure_variants(
    names: Iterable[str],
    *,
    header: Callable[[str], Record],
    measure: Callable[[str], Record],
    write: Callable[[Record], None],
) -> tuple[dict[str, Record], bool]:
    """Measure and record variants; return what those that are done found, and whether none failed.

    Args:
        names: of the variants, in order.
        header: what a record says before anything is measured.
        measure: measures a variant; raises `MemoryError` if it does not fit.
        write: takes each record.
    """
    done: dict[str, Record] = {}
    is_right = True
    for name in names:
        record = header(name)
        begun = time.perf_counter()
        try:
            done[name] = measure(name)
            record |= done[name]
        except MemoryError as error:
            record["skipped"] = str(error)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
            is_right = False
        record["seconds"] = time.perf_counter() - begun
        write(record)
    return done, is_right


def write_record(record: Record, *, out: Path | None, shown: Iterable[str]) -> None:
    """Append a record to the file, if there is one, and say in a line what is shown.

    Args:
        record: of a variant.
        out: JSON Lines.
        shown: fields that the line has, where the record has them.
    """
    if out:
        append_record(out, record)
    found = {name: record[name] for name in shown if record.get(name) is not None}
    words = [f"{name} {_short(value)}" for name, value in found.items()]
    if words:
        place = f"B={record['batch']} L={record['length']} {record['variant']}"
        print(f"{place}: {', '.join(words)}", flush=True)


def integers(text: str) -> list[int]:
    """Return an option's integers, written with commas."""
    return [int(word) for word in text.split(",")]


def split_variants(
    parser: argparse.ArgumentParser, given: argparse.Namespace, known: Sequence[str]
) -> None:
    """Make a list of `--variants`, which has names with commas; an unknown one ends the command."""
    given.variants = given.variants.split(",")
    unknown = sorted(set(given.variants) - set(known))
    if unknown:
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join(known)}")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {one:.2f}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
