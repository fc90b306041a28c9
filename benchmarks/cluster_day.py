"""A simulated day of a cluster: plain, unified and lockstep; more replicas or more ranks.

    python -m benchmarks.cluster_day --out benchmarks/results/cluster_day_simulated.jsonl \\
        --plot cluster_day.png

No model runs and no device is needed: the engine's own scheduler plans every step, the roofline of
`theory` says how long it takes, and accepted drafts are drawn from a law. Every record says
`is_simulation`. The same arguments give the same numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from pillarattn.evaluation.cluster_day import MODES, Day, simulate_day
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.plots import plot_cluster_day, save
from pillarattn.evaluation.step_clock import StepClock
from pillarattn.theory import efficiency_named, hardware_named, link_named, shape_from_config
from pillarattn.theory.known_models import known_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--hardware", default="H200-measured")
    parser.add_argument("--efficiency", default="compiled")
    parser.add_argument("--link", default="NVLink-4")
    parser.add_argument("--layouts", default="2x1,1x2", help="REPLICASxRANKS, with commas")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch", type=int, default=256, help="requests at a time for each rank")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--accepted", type=float, default=6.16, help="of k, assumed")
    parser.add_argument("--requests", type=int, default=Day.requests)
    parser.add_argument("--seconds", type=float, default=Day.seconds, help="length of the day")
    parser.add_argument("--output", type=float, default=Day.output_median, help="median tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = known_model(options.model)
    if found is None:
        parser.error(f"unknown model {options.model!r}")
    shape = shape_from_config(found[1], name=found[0])
    day = Day(
        requests=options.requests,
        seconds=options.seconds,
        output_median=options.output,
        seed=options.seed,
    )
    head = {
        "kind": "cluster_day_environment",
        "is_simulation": True,
        "environment": environment(),
        "commit": source_commit(),
        "options": {n: v for n, v in vars(options).items() if n not in ("out", "plot")},
    }
    records = []
    for layout in options.layouts.split(","):
        replicas, ranks = map(int, layout.split("x"))
        for mode in options.modes.split(","):
            clock = StepClock(
                shape,
                hardware_named(options.hardware),
                link_named(options.link),
                efficiency_named(options.efficiency),
                ranks=ranks,
                k=0 if mode == "plain" else options.k,
                s=options.s,
            )
            begun = time.perf_counter()
            record = simulate_day(
                day,
                clock,
                mode=mode,
                replicas=replicas,
                accepted=options.accepted,
                # As many a device in every layout.
                max_batch=options.batch * ranks,
            )
            spent = time.perf_counter() - begun
            records.append(record)
            print(
                f"simulated {layout} {mode}: {record['tokens_per_busy_second']:.0f} tokens/s a "
                f"busy replica, token {record['token_ms']['p50']:.1f} / "
                f"{record['token_ms']['p99']:.1f} ms (p50 / p99), first token "
                f"{record['first_token_seconds']['p99']:.2f} s (p99), done at "
                f"{record['last_end_seconds']:.0f} s, {record['evictions']} evictions "
                f"({spent:.0f} s of this machine)",
                flush=True,
            )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(one) + "\n" for one in (head, *records)))
    if options.plot is not None:
        save(plot_cluster_day(records)[0], options.plot)


if __name__ == "__main__":
    main()
