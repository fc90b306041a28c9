"""The engine beside what transformers has for batches: `generate`, and `generate_batch`.

    python -m benchmarks.engine_peers --device cuda --dtype bfloat16 --batch 64 --length 4096 \\
        --new-tokens 256 --out engine_peers.jsonl

Every variant decodes the same prompts greedily, to the same number of tokens, in one process and in
turns, after a run that warms it up:

    dynamic      the model's own `generate`
    static       the same with `cache_implementation="static"`, which transformers compiles on a GPU
                 (on a CPU it runs with `--static` only)
    batching     the model's own `generate_batch`, transformers' continuous batching
    plain        the engine without drafts
    speculative  the engine with drafts

The tokens of each run are compared with those of the first variant. In fp32 they must be equal; in
half precision records say how many requests differ. What a peer cannot do is recorded in its own
words, and the others go on.
On a GPU an eager model is bound by its host and varies several-fold from run to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peer_cell import OURS, PLAIN, STATIC, VARIANTS, PeerCell, Record, Tokens
from benchmarks.shape_cells import split_variants
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.results import append_record

SCHEMA = 1
KIND, RUN = "engine-peers", "engine-peers-run"
KINDS = ("decode", "whole")


class Turns:
    """Runs of all variants, one after the other, again and again.

    Args:
        cell: runs a variant.
        names: of the variants, in order.
        repeats: timed runs of each, after one that warms up.
        exact: whether tokens must be equal.
        on_done: given a variant and its timed run, as soon as it has ended: what is interrupted
            later keeps those.

    Attributes:
        found: a record a variant.
        differing: variants whose tokens had to be equal and are not.
    """

    def __init__(
        self, cell: Any, names: Sequence[str], *, repeats: int, exact: bool,
        on_done: Callable[[str, Record], None] = lambda name, run: None,
    ) -> None:  # fmt: skip
        self.cell, self.names, self.repeats, self.exact = cell, names, repeats, exact
        self.on_done = on_done
        self.found: dict[str, Record] = {name: {"runs": []} for name in names}
        self.differing: list[str] = []
        self._expected: Tokens | None = None
        self._reference = ""

    def take(self) -> None:
        """Run every variant as often as asked; one that fails is left out from then on."""
        for turn in range(self.repeats + 1):
            # Each turn begins with another one, so that none has the same neighbour throughout.
            first = turn % len(self.names)
            for name in [*self.names[first:], *self.names[:first]]:
                if "error" not in self.found[name]:
                    self._run(name, timed=turn > 0)
        for one in self.found.values():
            if "error" not in one:
                summarise(one)
        plain = self.found.get(PLAIN, {"error": "not asked for"})
        for one in self.found.values():
            if "error" not in one and "error" not in plain:
                one["plain_over"] = {
                    kind: plain[f"{kind}_tokens_per_second"] / one[f"{kind}_tokens_per_second"]
                    for kind in KINDS
                }

    def _run(self, name: str, *, timed: bool) -> None:
        record = self.found[name]
        print(f"{name}, {'run' if timed else 'warm-up'}", flush=True)
        try:
            tokens, run = self.cell.run(name)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
            return
        if timed:
            record["runs"].append(run)
            self.on_done(name, run)
        if self._expected is None:
            self._expected, self._reference = tokens, name
        record["compared_with"] = self._reference
        different = sum(a != b for a, b in zip(tokens, self._expected, strict=True))
        record["different_requests"] = max(different, record.get("different_requests", 0))
        if different and self.exact:
            self.differing.append(name)
            record["error"] = (
                f"ValueError: {different} of {len(tokens)} requests have other tokens than those "
                f"of {self._reference}"
            )


def summarise(record: Record) -> None:
    """Add the median speed of decode and of all, each with its spread, and processor time."""
    for kind in KINDS:
        speeds = [
            one[f"{kind}_tokens"] / max(one[f"{kind}_seconds"], 1e-9) for one in record["runs"]
        ]
        record[f"{kind}_tokens_per_second"] = median(speeds)
        record[f"{kind}_spread"] = [min(speeds), max(speeds)]
    record["processor_seconds"] = median(one["processor_seconds"] for one in record["runs"])


def table(records: Iterable[tuple[str, Record]]) -> Table:
    """Return what each variant reached, and the engine's plain mode over it; records have more."""
    found = Table(
        "variant", "decode tokens/s", "plain / it", "whole tokens/s", "plain / it", "differ"
    )
    for name, one in records:
        if "runs" not in one or "error" in one:
            continue
        over = {kind: f"{ratio:.2f}x" for kind, ratio in one.get("plain_over", {}).items()}
        low, high = one["decode_spread"]
        found.add_row(
            name, f"{one['decode_tokens_per_second']:,.1f} ({low:,.1f}..{high:,.1f})",
            over.get("decode", ""), f"{one['whole_tokens_per_second']:,.1f}",
            over.get("whole", ""), str(one["different_requests"]),
        )  # fmt: skip
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, or a hub name")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens of each request")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which, and in what order")
    parser.add_argument("--static", action="store_true", help="run it on a CPU, too")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, after one to warm up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, help="JSON Lines to append to")
    given = parser.parse_args(arguments)
    for option, least in (("batch", 1), ("length", 1), ("new_tokens", 2), ("repeats", 1), ("k", 1)):
        if getattr(given, option) < least:
            name = option.replace("_", "-")
            parser.error(f"--{name} must be at least {least}, got {getattr(given, option)}")
    if not 0 < given.s <= 1:
        parser.error(f"--s must be above 0 and at most 1, got {given.s}")
    split_variants(parser, given, VARIANTS)
    return given


def main() -> None:
    given = parsed()
    cell = PeerCell(given)
    about = {
        "schema": SCHEMA, "settings": {**vars(given), "out": None},
        "environment": environment(cell.model.device), "commit": source_commit(),
    }  # fmt: skip

    def write(kind: str, name: str, record: Record) -> None:
        if given.out:
            append_record(given.out, {"kind": kind, **about, "variant": name, **record})

    skipped: dict[str, Record] = {}
    if cell.model.device.type == "cpu" and not given.static and STATIC in given.variants:
        skipped[STATIC] = {"skipped": "transformers compiles it on a GPU only: see --static"}
    names = [name for name in given.variants if name not in skipped]
    if not names:
        raise SystemExit(f"nothing to run: {skipped[STATIC]['skipped']}")
    turns = Turns(
        cell, names, repeats=given.repeats, exact=cell.model.dtype == torch.float32,
        on_done=lambda name, run: write(RUN, name, {"run": run}),
    )  # fmt: skip
    turns.take()
    records = [(name, {**turns.found, **skipped}[name]) for name in given.variants]
    for name, record in records:
        write(KIND, name, record)
        for word in ("error", "skipped"):
            if word in record:
                print(f"{name}: {record[word]}", flush=True)
    Console().print(table(records))
    if turns.differing:
        raise SystemExit(f"other tokens in fp32: {', '.join(turns.differing)}")
    failed = [name for name in OURS if "error" in turns.found.get(name, {})]
    if failed:
        raise SystemExit(f"the engine failed: {', '.join(failed)}; their records say why")


if __name__ == "__main__":
    main()
