"""Examine every architecture and write the table: `python -m tests.architectures.table`.

It rewrites the installed version's rows in `pillarattn/patch/architectures.json`, and
`docs/architectures.md` from all rows. `--only TYPE ...` examines a few and keeps the other rows;
`--docs` only writes the page again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track

from tests.architectures import recipes
from tests.architectures.suite import Finding, examine

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "pillarattn" / "patch" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
VERSION = ".".join(transformers.__version__.split(".")[:2])
VERDICTS = ("lossless", "lossless-dense-draft", "refused")


def main() -> None:
    """Examine, write, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None, help="model types")
    parser.add_argument("--docs", action="store_true", help="only write the page")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    known: dict[str, dict[str, Any]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if not options.docs:
        types = options.only or [*recipes.model_types(), *recipes.multimodal_types()]
        rows = dict(known.get(VERSION, {})) if options.only else {}
        torch.set_num_threads(1)
        with ProcessPoolExecutor(options.workers) as pool:
            findings = list(track(pool.map(examined, types), total=len(types)))
        wrong = [f"{f.model_type}: {'; '.join(f.faults)}" for f in findings if f.faults]
        rows.update({f.model_type: row_of(f) for f in findings if not f.faults})
        known[VERSION] = dict(sorted(rows.items()))
        TABLE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(known))
    print(counts(known.get(VERSION, {})))
    if not options.docs and wrong:
        raise SystemExit("wrong or crashed, and left out of the table:\n" + "\n".join(wrong))


def examined(model_type: str) -> Finding:
    """Examine one type; what is raised becomes a fault, so that the others go on."""
    try:
        return examine(model_type)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}".replace("\n", " ")
        return Finding(model_type, "refused", None, (fault,))


def row_of(finding: Finding) -> dict[str, Any]:
    """Return what the table keeps of a finding."""
    reason = finding.reason and re.sub(r"^\w+: ", "", finding.reason)
    # The measured gap of random models is of no use to a reader.
    if reason:
        reason = re.sub(r" by [0-9.e+-]+ of the logits' spread \(allowed: [0-9.]+\)", "", reason)
        reason = re.sub(r"; its output would not be lossless.*|, so use .*", "", reason)
        reason = re.sub(r"; use (it|the model) without assistant=.*", "", reason)
    return {"verdict": finding.verdict, "reason": reason, "notes": list(finding.notes)}


def counts(rows: dict[str, dict[str, Any]]) -> str:
    """Return the closing counts, as a Markdown table."""
    lines = ["| models | " + " | ".join(VERDICTS) + " | all |", "|---|---|---|---|---|"]
    groups = {
        "decoder-only": recipes.decoder_only_types(),
        "all causal-LM types": recipes.model_types(),
        "multimodal, text prompts": recipes.multimodal_types(),
    }
    for name, types in groups.items():
        found = Counter(rows[t]["verdict"] for t in types if t in rows)
        line = [str(found[verdict]) for verdict in VERDICTS]
        lines.append(f"| {name} | {' | '.join(line)} | {sum(found.values())} |")
    return "\n".join(lines)


def page(known: dict[str, dict[str, Any]]) -> str:
    """Return `docs/architectures.md`."""
    newest = max(known, key=lambda v: tuple(map(int, v.split("."))))
    others = sorted(set(known) - {newest})
    lines = [
        HEAD.format(newest=newest),
        counts(known[newest]),
        "",
        f"| model type | {newest} | " + " | ".join(others) + " | reason, remarks |",
        "|---|---" + "|---" * len(others) + "|---|",
    ]
    for name in sorted(set().union(*known.values())):
        row = known[newest].get(name)
        cells = [row["verdict"] if row else "no such type"]
        for version in others:
            other = known[version].get(name)
            cells.append("no such type" if other is None else _same(row, other))
        chosen = row or known[others[0]][name]
        remarks = [chosen["reason"] or "", *chosen["notes"]]
        for version in others:
            other = known[version].get(name)
            if row and other and other["verdict"] != row["verdict"]:
                remarks.append(f"{version}: {other['reason'] or 'no reason against it'}")
        text = "; ".join(filter(None, remarks)).replace("|", "/")
        lines.append(f"| {name} | {' | '.join(cells)} | {text} |")
    return "\n".join(lines) + "\n"


def _same(row: dict[str, Any] | None, other: dict[str, Any]) -> str:
    return "same" if row and row["verdict"] == other["verdict"] else str(other["verdict"])


HEAD = """# Architectures

Generated by `python -m tests.architectures.table` from tiny random models of every type that
transformers {newest} maps to `AutoModelForCausalLM`, on the CPU in fp32: do not edit it by hand.
Each row was decoded greedily against plain `generate`, and by seeded sampling against `k=0`, one
prompt alone and three of different lengths padded on the left, with rejected drafts.

* **lossless**: drafts by sparse attention, output equal to plain decoding's.
* **lossless-dense-draft**: sparse attention cannot act; the model keeps its own attention and
  cache, drafts come from prompt lookup, and the output is equal all the same.
* **refused**: `patch` raises `UnsupportedModelError` with the reason.

`pillarattn info MODEL` prints the row of a model. A model that is not listed is judged by the same
proof when it is patched: blocks, single steps and roll backs must agree on random tokens.
"""

if __name__ == "__main__":
    main()
