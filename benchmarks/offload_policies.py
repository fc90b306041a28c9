"""Eviction policies in the simulator: long uneven outputs in a pool that is too small for them.

Run: python -m benchmarks.offload_policies    (some minutes; pure Python, no device)
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pillarattn.engine.eviction import EVICTION_POLICIES
from pillarattn.engine.simulator import RESERVE, Machine, Workload, compare
from pillarattn.evaluation.environment import environment

RESULTS = Path(__file__).parent / "results" / "offload_simulated.jsonl"
WORKLOAD = Workload(requests=300)
# A pool for about half of what 128 requests come to; a PCIe 5 link and an NVLink one.
MACHINES = [Machine(kv_tokens=200_000, link=link) for link in (55e9, 450e9)]


def main() -> None:
    """Simulate every policy on both links, and write one record each."""
    about = {"schema": 1, "kind": "simulation", "environment": environment(),
             "command": "python -m benchmarks.offload_policies"}  # fmt: skip
    lines = [about]
    for machine in MACHINES:
        for policy in (RESERVE, *EVICTION_POLICIES.names()):
            (outcome,) = compare([policy], WORKLOAD, machine)
            lines.append(
                {"kind": "simulated", "machine": asdict(machine), "workload": asdict(WORKLOAD),
                 **asdict(outcome), "tokens_per_second": outcome.tokens_per_second}
            )  # fmt: skip
            print(f"link {machine.link:.3g} {policy:9} {outcome.tokens_per_second:8.0f} tok/s")
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
