"""Strategies against shares of the context; stop it and run it again: it goes on where it was.

Run: python examples/sweep.py [FOLDER] [MODEL]    (default: sweep-example, smollm2)
"""

from __future__ import annotations

import sys

from pillarattn.evaluation import expand, run_sweep

SWEEP = {
    "base": {
        "task": "worked_maths",
        "n": 1,
        "context_tokens": 800,
        "max_new_tokens": 48,
        "options": {"min_budget": 16, "recent": 8},
        "recall_tokens": 24,
    },
    "grid": {
        "strategy": ["pillar", "streaming", "oracle", "uniform"],
        "s": [0.02, 0.05, 0.1],
    },
}


def main(folder: str = "sweep-example", model: str = "smollm2") -> None:
    """Run what is missing in `folder`, and print one line a cell."""
    records = run_sweep(expand(SWEEP, overrides={"model": model}), folder)
    for record in records:
        if record["status"] == "ok":
            accepted = record["metrics"]["mean_accepted"]
            print(f"{record['label']}: {accepted:.2f} accepted, {record['lossless']['verdict']}")
        else:
            print(f"{record['label']}: {record['error']}")
    print(f"now: python examples/report.py {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
