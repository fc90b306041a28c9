"""A sweep over several processes, a whole model in each: one GPU a process, or CPUs.

Run: accelerate launch --multi_gpu --num_processes 2 examples/data_parallel.py [FOLDER] [MODEL]
                                                    (default: parallel-example, smollm2)

`--multi_gpu` starts several processes without GPUs too. Run it again, with any number of processes,
and it goes on where it was: cells that a lost process had not finished are run then.
"""

from __future__ import annotations

import sys

from pillarattn.evaluation import expand, run_sweep
from pillarattn.evaluation.runner import Runner
from pillarattn.evaluation.sweep import Worker

SWEEP = {
    "base": {
        "task": "worked_maths",
        "n": 1,
        "context_tokens": 800,
        "max_new_tokens": 48,
        "options": {"min_budget": 16, "recent": 8},
    },
    "grid": {"strategy": ["pillar", "streaming"], "k": [4, 8]},
}


def main(folder: str = "parallel-example", model: str = "smollm2") -> None:
    """Run this process's share of what is missing; the process that ends last shows all."""
    worker = Worker.from_environment()
    configs = expand(SWEEP, overrides={"model": model})
    # No process waits for another: the cells are dealt out by rank.
    records = run_sweep(configs, folder, worker=worker, runner=Runner(device=worker.device))
    print(f"process {worker.rank + 1} of {worker.world} has run its share")
    if len(records) < len(configs):
        return
    for record in records:
        if record["status"] == "ok":
            accepted = record["metrics"]["mean_accepted"]
            print(f"{record['label']}: {accepted:.2f} accepted, {record['lossless']['verdict']}")
        else:
            print(f"{record['label']}: {record['error']}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
