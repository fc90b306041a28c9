"""One task, one setting: answers, acceptance, speed, bytes read, and whether it is lossless.

Run: python examples/evaluate.py [MODEL] [TASK] [DATA]    (default: smollm2, worked_maths)
"""

from __future__ import annotations

import sys

from pillarattn.evaluation import EvalConfig, Runner


def main(model: str = "smollm2", task: str = "worked_maths", data: str | None = None) -> None:
    """Evaluate a few problems and print what was measured."""
    config = EvalConfig(
        model=model,
        task=task,
        data=data,
        n=2,
        # Solved problems in front make the context long enough for a selection to matter.
        context_tokens=800,
        k=8,
        s=0.05,
        strategy="pillar",
        options={"min_budget": 32},
        max_new_tokens=64,
    )
    record = Runner().run(config)
    metrics = record["metrics"]
    print(f"{config.label}  ({config.hash})")
    print(f"  {metrics['mean_accepted']:.2f} of {config.k} drafts accepted in a round")
    print(f"  by position: {[round(share, 2) for share in metrics['acceptance_by_position']]}")
    print(f"  {metrics['kv_bytes_share']:.0%} of plain decoding's reads of the cache")
    print(f"  {metrics['recall']:.1%} of the attention's mass on the keys that drafts read")
    print(f"  {metrics['decode_speedup']:.2f}x the speed of plain decoding")
    print(f"  {metrics['correct']} of {metrics['judged']} answers right")
    print(f"  {record['lossless']['verdict']}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
