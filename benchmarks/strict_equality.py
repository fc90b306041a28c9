"""Tokens of speculative and plain decoding in half precision, strict and not, and its cost.

    CUBLASLT_WORKSPACE_SIZE=1 python -m benchmarks.strict_equality --batch 64 --new-tokens 512 \\
        --out benchmarks/results/strict_h200.jsonl

Strict: rows that differ between k = 8 and k = 0, of which there must be none. Default: rows that
differ from k = 0 and from the model's own `generate`, and at each first difference the gap of the
two tokens' logits, in the model's own forward over the tokens before it. Seconds are of decode.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

import pillarattn
from benchmarks.round_profile import random_model
from pillarattn.evaluation.batch_timing import timed_batch
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.generate_bench_cell import prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["smollm2", "8b"], default="smollm2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.shape == "smollm2":
        # The real model: a random one repeats itself or ties.
        model, tokenizer = load_model("smollm2", device="cuda", dtype="bfloat16")
        ids = prompts(tokenizer, given.batch, given.length, shared=False).cuda()
    else:
        model = random_model(given.shape)
        ids = torch.randint(1, model.config.vocab_size, (given.batch, given.length), device="cuda")
    pillarattn.patch(model)
    record: dict[str, Any] = {
        "kind": "strict-equality", "environment": environment(model.device),
        "commit": source_commit(), "settings": {**vars(given), "out": None}, "runs": {},
    }  # fmt: skip
    tokens: dict[str, torch.Tensor] = {}
    cases: dict[str, dict[str, Any] | None] = {
        "strict k=0": {"k": 0, "strict": True}, "strict": {"k": given.k, "strict": True},
        "k=0": {"k": 0}, "default": {"k": given.k}, "model's own": None,
    }  # fmt: skip
    for name, options in cases.items():
        tokens[name], record["runs"][name] = run(model, ids, given.new_tokens, options)
    for one, other in (("strict", "strict k=0"), ("default", "k=0"), ("default", "model's own")):
        found = differences(model, tokens[one], tokens[other], given.length)
        record[f"{one} against {other}"] = found
        print(one, "against", other, {k: v for k, v in found.items() if k != "gaps"})
    print(record["runs"])
    if given.out:
        with given.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if record["strict against strict k=0"]["rows"]:
        raise SystemExit("strict tokens differ")


def run(
    model: Any, ids: torch.Tensor, new_tokens: int, options: dict[str, Any] | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the tokens of a second run, and its times: the first one records and compiles."""
    extra, pillar = {}, None
    if options is not None:
        pillar = pillarattn.SelfSpeculativeGenerator(**{"s": 0.05, **options})
        extra["assistant"] = pillar
    for _ in range(1 if pillar is None else 2):
        tokens, times = timed_batch(
            model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            end_tokens=frozenset(), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0, **extra,
        )  # fmt: skip
    found = {"decode_seconds": times.decode_seconds, "tokens": times.decoded_tokens}
    if pillar is not None:
        found |= {"mean_accepted": pillar.stats.mean_accepted}
        pillar.free()
    return tokens, found


def differences(model: Any, ours: torch.Tensor, theirs: torch.Tensor, start: int) -> dict[str, Any]:
    """Return how many rows differ, where they begin to, and the logit gaps there."""
    places, gaps = [], []
    for mine, other in zip(ours, theirs, strict=True):
        apart = (mine != other).nonzero()
        if not len(apart):
            continue
        place = int(apart[0])
        with torch.no_grad():
            logits = model(input_ids=mine[None, :place], logits_to_keep=1).logits[0, -1].float()
        places.append(place - start)
        gaps.append(abs(float(logits[mine[place]] - logits[other[place]])))
    tokens = sum(places) + (len(ours) - len(places)) * (ours.shape[1] - start)
    return {
        "rows": len(places), "of": len(ours), "tokens_before": tokens, "places": places,
        "median_gap": median(gaps) if gaps else None, "largest_gap": max(gaps, default=None),
        "gaps": gaps,
    }  # fmt: skip


if __name__ == "__main__":
    main()
