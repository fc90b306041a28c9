"""Rollouts as reinforcement learning draws them: many samples a prompt, rewards and advantages.

Run: python examples/rollouts.py [MODEL [SAMPLES]]    (default: the built-in smollm2, 64 samples)
"""

from __future__ import annotations

import statistics
import sys

import pillarattn
from pillarattn.evaluation import load_model

SHOTS = "Q: 3 + 4 = ? A: 7.\nQ: 10 + 5 = ? A: 15.\nQ: 8 + 9 = ? A: 17.\n"
TASKS = [(12, 7), (25, 14), (31, 9)]


def advantages(rewards: list[float]) -> list[float]:
    """Return rewards less their group's mean, over its deviation (0 where all are alike)."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / deviation if deviation else 0.0 for reward in rewards]


def main(name: str = "smollm2", samples: int = 64) -> None:
    """Draw a group of samples for each task, and print what a trainer would take from it."""
    model, tokenizer = load_model(name)
    pillar = pillarattn.PillarConfig(k=4, s=0.25, min_budget=32)
    # "rejection" keeps more drafts; "gumbel", the default, repeats each sample by its seed alone.
    config = pillarattn.EngineConfig(kv_tokens=32768, max_batch=samples, seed=0, pillar=pillar)
    engine = pillarattn.Engine(pillarattn.patch(model), config, tokenizer=tokenizer)
    params = pillarattn.SamplingParams(
        max_tokens=12, temperature=1.0, n=samples, stop="\n", acceptance="rejection"
    )
    outputs = engine.generate([f"{SHOTS}Q: {a} + {b} = ? A:" for a, b in TASKS], params)
    for i, (a, b) in enumerate(TASKS):
        group = outputs[i * samples : (i + 1) * samples]
        rewards = [float((output.text or "").strip(" .") == str(a + b)) for output in group]
        best = max(zip(advantages(rewards), group, strict=True), key=lambda pair: pair[0])
        print(f"{a} + {b}: mean reward {statistics.fmean(rewards):.2f} of {len(group)} samples, "
              f"largest advantage {best[0]:+.2f} for {best[1].text!r}")  # fmt: skip
    stats = engine.stats
    asked = sum(len(output.prompt_token_ids) for output in outputs)
    rate = f"{stats.acceptance_rate:.0%} of drafts accepted"
    print(f"{stats.emitted} new tokens in {stats.steps} steps, {rate}; "
          f"{stats.prefill_rows} of {asked} prompt tokens were computed")  # fmt: skip
    # A trainer now updates the weights in place: the next call sees that, and shares no old pages.


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
