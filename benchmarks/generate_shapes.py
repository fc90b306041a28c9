"""`generate` at named model shapes: the library beside all that plain decoding can do there.

    python -m benchmarks.generate_shapes --shape 8b --batch 1,16 --length 8192 --out generate.jsonl
    python -m benchmarks.generate_shapes --shape 8b --length 32768 --new-tokens 32 \\
        --variants dynamic,plain,speculative --out prompt.jsonl

Weights and prompts are random and drafts are accepted by a replayed pattern: records say so. Times
of passes are real. One run compares

    dynamic      the model's own `generate`
    static       the same with `cache_implementation="static"`, which transformers compiles on a GPU
    baseline     `torch.compile`, one CUDA graph, keys written in place: no prompt, no `generate`
    plain        the library, k = 0
    speculative  the library, k and s fixed
    auto         the library, its gate chooses k and s

`--batch` and `--length` take lists with commas, every pair of which is a cell. Each variant runs
until it is warm (its runs are all in its record) and its last run counts; a record is written as
soon as its variant is done, and after the last one of a cell a record of their ratios.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.generate_cell import REPLAYED, STATIC, VARIANTS, GenerateCell
from benchmarks.shape_cells import (
    Record,
    integers,
    measure_variants,
    split_variants,
    write_record,
)
from benchmarks.shape_limits import BASELINE
from benchmarks.shape_models import COMPILE_MODES, SHAPES, random_model
from pillarattn.evaluation.environment import environment, source_commit

KIND, RATIOS, SCHEMA = "generate-shapes", "generate-shapes-ratios", 1
WIDTH = 150
# What the others are compared with, and in what, where both have it: more speed is better, and less
# of the rest.
OTHERS = ("dynamic", STATIC, BASELINE, "plain")
COMPARED = ("tokens_per_second", "prompt_seconds", "peak_bytes")
# Of a record's fields, those that its line has; ratios are in the table.
SHOWN = (
    "prompt_seconds", "step_ms", "tokens_per_round", "tokens_per_second", "acceptance_rate",
    "equal_rows", "warnings", "seconds", "skipped", "error",
)  # fmt: skip


def main() -> None:
    given = parsed()
    device = torch.device(given.device)
    model = random_model(given.shape, device)
    written: list[Record] = []
    states = [
        measure_cell(given, GenerateCell(given, model, batch, length), written)
        for batch in given.batch
        for length in given.length
    ]
    # Output that goes to a file has no width of its own.
    Console(width=WIDTH).print(table_of(written))
    if not all(states):
        raise SystemExit("some variants failed; their records say why")


def parsed() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--batch", type=integers, default=[1], help="rows; with commas")
    parser.add_argument("--length", type=integers, default=[16384], help="tokens; with commas")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each row")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, and in what order")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--rate", type=float, default=0.77, help="accepted / drafted at --k")
    parser.add_argument("--compile", choices=COMPILE_MODES, default=COMPILE_MODES[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    split_variants(parser, given, VARIANTS)
    if not given.static:
        given.variants = [name for name in given.variants if name != STATIC]
    if given.new_tokens < 2:
        parser.error("--new-tokens must be at least 2: the prompt gives the first one")
    if given.k < 1:
        parser.error("--k must be at least 1; k = 0 is the variant plain")
    return given


def measure_cell(given: argparse.Namespace, cell: GenerateCell, written: list[Record]) -> bool:
    """Write a cell's records, here and to the file; return whether no variant has failed."""

    def write(record: Record) -> None:
        written.append(record)
        write_record(record, out=given.out, shown=SHOWN)

    done, is_right = measure_variants(
        given.variants, header=lambda name: header(given, cell, name), measure=cell.measure,
        write=write,
    )  # fmt: skip
    if len(done) > 1:
        write({**header(given, cell, "ratios"), "kind": RATIOS, **ratios_of(done)})
    return is_right


def header(given: argparse.Namespace, cell: GenerateCell, name: str) -> Record:
    """Return what a record says before anything is measured."""
    is_replayed = name in REPLAYED or name == "ratios"
    return {
        "kind": KIND, "schema": SCHEMA, "shape": given.shape, "variant": name, "batch": cell.batch,
        "length": cell.length, "weights": "random",
        "prompts": "random keys and values" if name == BASELINE else "random tokens",
        "acceptance": f"replayed {given.rate:g}" if is_replayed else None,
        "settings": {**vars(given), "out": None},
        "environment": environment(cell.model.device), "commit": source_commit(),
    }  # fmt: skip


def ratios_of(done: dict[str, Record]) -> Record:
    """Return each variant's speed, prompt seconds and peak memory over those of plain decoding."""
    pairs = [(a, b) for b in OTHERS if b in done for a in done if a != b]
    return {
        "ratios" if field == COMPARED[0] else f"{field}_ratios": {
            f"{a} / {b}": done[a][field] / done[b][field]
            for a, b in pairs
            if done[a].get(field) and done[b].get(field)
        }
        for field in COMPARED
    }


def table_of(records: list[Record]) -> Table:
    """Return what was measured: a row a variant, with its speed over each plain decoding."""
    over = [f"over {name}" for name in OTHERS]
    headings = ("B", "L", "variant", "prompt s", "ms", "tokens a round", "tokens/s", *over,
                "peak GB", "note")  # fmt: skip
    table = Table(*headings, title="ms of a step or a round; in brackets over dynamic's")
    ratios = {(r["batch"], r["length"]): r for r in records if r["kind"] == RATIOS}
    for record in records:
        if record["kind"] == RATIOS:
            table.add_section()
            continue
        name, found = record["variant"], ratios.get((record["batch"], record["length"]), {})
        speeds = found.get("ratios", {})
        table.add_row(
            str(record["batch"]), f"{record['length']:,}", name,
            _beside(record, "prompt_seconds", found, ".3f"),
            _number(record.get("step_ms"), ".2f"),
            _number(record.get("tokens_per_round"), ".2f"),
            _number(record.get("tokens_per_second"), ",.0f"),
            *(_number(speeds.get(f"{name} / {other}"), ".2f") for other in OTHERS),
            _beside(record, "peak_bytes", found, ".1f", 1e9),
            record.get("skipped") or record.get("error") or "",
        )  # fmt: skip
    return table


def _beside(record: Record, field: str, found: Record, style: str, unit: float = 1.0) -> str:
    """Return a field, and in brackets what it is of the model's own."""
    ratio = found.get(f"{field}_ratios", {}).get(f"{record['variant']} / {OTHERS[0]}")
    value = _number(record.get(field), style, unit)
    return value if ratio is None else f"{value} ({ratio:.2f})"


def _number(value: float | None, style: str, unit: float = 1.0) -> str:
    return "" if value is None else format(value / unit, style)


if __name__ == "__main__":
    main()
