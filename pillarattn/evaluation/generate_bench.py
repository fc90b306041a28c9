"""`bench generate`: plain and speculative `generate` in turns, resumable, with what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.generate_bench_cell import BenchCell, Heard
from pillarattn.evaluation.generate_bench_settings import PLAIN, SCHEMA, STATIC, GenerateBench
from pillarattn.evaluation.results import append_record, parse_records
from pillarattn.patch.patching import patch

KIND = "generate-bench"
Record = dict[str, Any]


def run_generate_bench(
    bench: GenerateBench,
    *,
    out: Path | None = None,
    on_cell: Callable[[int, int, bool], None] = lambda batch, length, is_done: None,
    on_run: Heard = lambda name: None,
) -> list[Record]:
    """Measure every cell that `out` does not hold yet; return the records of all cells.

    Args:
        bench: settings.
        out: JSON Lines that records are appended to, one a cell.
        on_cell: told of each cell before it starts, and whether it was measured before.
        on_run: told of each run before it starts.

    Raises:
        ValueError: `out` holds something else, or a model refuses an option.
    """
    known = {record["hash"]: record for record in read_bench(out)} if out is not None else {}
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    found: list[Record] = []
    model = tokenizer = None
    for batch, length in bench.cells:
        name = bench.cell_hash(batch, length)
        on_cell(batch, length, name in known)
        if name in known:
            found.append(known[name])
            continue
        if model is None:
            model, tokenizer = load_model(bench.model, device=bench.device, dtype=bench.dtype)
            patch(model, join_weights=model.device.type == "cuda")
        cell = BenchCell(bench, model, tokenizer, batch=batch, length=length, on_run=on_run)
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "hash": name,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "batch": batch,
            "length": length,
            "settings": bench.to_dict(),
            "environment": environment(model.device),
            "commit": source_commit(),
            "variants": cell.run(),
        }
        compare_variants(record)
        if out is not None:
            append_record(out, record)
        found.append(record)
    return found


def read_bench(path: Path) -> list[Record]:
    """Return the records of a file; none if there is no such file.

    Raises:
        ValueError: it holds something else; the message names file and record.
    """
    if not path.exists():
        return []
    records = parse_records(path.read_bytes(), path)
    for number, record in enumerate(records, 1):
        if record.get("kind") != KIND or record.get("schema") != SCHEMA:
            raise ValueError(
                f"{path}, record {number}: not a record of `bench generate`; give --out another "
                "file"
            )
    return records


def compare_variants(record: Record) -> None:
    """Add each variant's speed-up over plain decoding, and what the gate is measured by."""
    by_name = {one["name"]: one for one in record["variants"]}
    plain, static = by_name[PLAIN], by_name.get(STATIC)
    for one in record["variants"]:
        one["decode_speedup"] = _ratio(one, plain)
        one["total_speedup"] = plain["total_seconds"] / max(one["total_seconds"], 1e-9)
        if static is not None:
            one["decode_speedup_over_static"] = _ratio(one, static)
    fixed = [one for one in record["variants"] if isinstance(one["k"], int)]
    best = max(fixed, key=lambda one: one["decode_speedup"], default=None)
    record["best_fixed"] = None if best is None else best["name"]
    for one in record["variants"]:
        if one["k"] is not None and not isinstance(one["k"], int):
            # Plain decoding is a setting too: the gate may choose it.
            reached = max(1.0, best["decode_speedup"]) if best is not None else 1.0
            one["share_of_best"] = one["decode_speedup"] / reached


def failures(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each variant whose tokens were not plain decoding's."""
    lines = []
    for record in records:
        place = f"B={record['batch']} L={record['length']}"
        for one in record["variants"]:
            verdict = one["lossless"]
            if verdict is not None and not verdict["lossless"]:
                lines.append(f"{place} {one['name']}: {verdict['verdict']}")
            elif one["k"] is not None and one.get("same_tokens") is False:
                lines.append(f"{place} {one['name']}: the timed runs' tokens differ from plain's")
    return lines


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return float(one["decode_tokens_per_second"] / max(other["decode_tokens_per_second"], 1e-9))
