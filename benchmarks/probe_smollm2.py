"""Acceptance of every strategy on a long real text with SmolLM2-135M, teacher-forced.

    python -m benchmarks.probe_smollm2 --dataset olympiadbench.jsonl \\
        --out benchmarks/results/probe_smollm2_cpu.jsonl

Settings are those of an independent measurement that the figures can be held against: fp32, k=8,
s=0.05 with no floor, T=0.6, 8192 tokens, rounds from 1024 on, the k + 2 newest tokens forced inside
the budget, no sinks but for `streaming` (4). The first line of the record is the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

from pillarattn import PillarConfig
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.probe import acceptance_probe
from pillarattn.evaluation.probe_text import problem_text, token_ids
from pillarattn.modules.strategies import OracleStrategy, QuestStrategy, Strategy

STRATEGIES: tuple[str | Strategy, ...] = (
    *("pillar", "streaming", "snapkv", "h2o", "vegas", "value_aware", "union", "triforce"),
    *(QuestStrategy(group=g, once=once) for once in (False, True) for g in ("mean", "max")),
    *("uniform", OracleStrategy()),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--start", type=int, default=1024)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    model, tokenizer = load_model("smollm2", device=arguments.device, dtype=arguments.dtype)
    ids = token_ids(problem_text(arguments.dataset), tokenizer, max_tokens=arguments.tokens)
    configs = [
        PillarConfig(
            k=arguments.k,
            s=arguments.s,
            strategy=strategy,
            min_budget=1,
            recent=arguments.k + 2,
            sink=4 if strategy == "streaming" else 0,
        )
        for strategy in STRATEGIES
    ]
    begun = time.perf_counter()
    table = acceptance_probe(
        model,
        ids,
        configs,
        temperature=arguments.temperature,
        start=arguments.start,
        per_round=True,
        on_progress=lambda share: print(
            f"{share:6.1%} {time.perf_counter() - begun:5.0f} s", end="\r", flush=True
        ),
    )
    text = " ".join(map(str, ids.tolist())).encode()
    table.about |= {
        "model": "smollm2",
        "text": arguments.dataset.name,
        "ids_sha256": hashlib.sha256(text).hexdigest(),
    }
    print(f"\n{table}\n{table.about['seconds']} s, saved {table.save(arguments.out)}")


if __name__ == "__main__":
    main()
