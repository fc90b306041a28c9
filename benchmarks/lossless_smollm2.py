"""Greedy equality of speculative and plain decoding on SmolLM2-135M, over strategies, k and s.

    python -m benchmarks.lossless_smollm2 --out benchmarks/results/lossless_smollm2_cpu.jsonl

24 prompts (one token, short, about 2,000 tokens), each decoded plainly alone, then speculatively
in left-padded batches. A difference is listed with its logit gap, never hidden. Every line of the
record is one (group, strategy, k, s).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import pillarattn
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.environment import environment
from pillarattn.evaluation.tasks.worked_maths import worked_maths

SHORT = (
    "The three laws of motion are",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "List five uses of copper.\n1.",
    "Water boils at 100 degrees because",
    "To be, or not to be",
    "In 1969,",
    "Dear Sir or Madam,\n\nI am writing to",
)
STRATEGIES = ("pillar", "streaming", "uniform", "full", "oracle")


def prompt_groups(tokenizer: Any, long_tokens: int, long_count: int) -> dict[str, list[list[int]]]:
    """Return prompts as token lists, by group: one token, short, long."""
    words = ("The", "Problem", "A", "1", "If", "Let", "\n", "I")
    one = [[tokenizer(word).input_ids[0]] for word in words]
    short = [tokenizer(text).input_ids for text in SHORT]
    # Lengths differ, so that rows are padded and ragged from the start.
    long = [
        tokenizer(worked_maths(long_tokens, tokenizer, seed=seed)).input_ids[37 * seed :]
        for seed in range(long_count)
    ]
    return {"one token": one, "short": short, "long": long}


def padded(prompts: list[list[int]], pad: int, device: Any) -> dict[str, torch.Tensor]:
    """Left-pad token lists into a batch."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def first_difference(
    model: Any, prompt: list[int], want: list[int], got: list[int]
) -> dict[str, Any] | None:
    """Return the first difference of one row with its logit gap under full attention, or None."""
    if want == got:
        return None
    place = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
    ids = torch.tensor([prompt + want[:place]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1].float()
    gap = float(logits[want[place]] - logits[got[place]])
    return {"position": place, "expected": want[place], "got": got[place], "logit_gap": gap}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--long-count", type=int, default=8)
    parser.add_argument("--groups", default="one token,short,long")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ks", default="1,4,8")
    parser.add_argument("--ss", default="0.02,0.05,1.0")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--min-budget", type=int, default=16)
    arguments = parser.parse_args()
    model, tokenizer = load_model("smollm2", dtype=arguments.dtype)
    pillarattn.patch(model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    options = {
        "max_new_tokens": arguments.new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": pad,
    }
    groups = prompt_groups(tokenizer, arguments.long_tokens, arguments.long_count)
    groups = {name: groups[name] for name in arguments.groups.split(",")}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    differing = tokens = 0
    with arguments.out.open("w") as record:
        header = {"environment": environment(model.device), "dtype": arguments.dtype, **options}
        record.write(json.dumps(header, default=str) + "\n")
        for name, prompts in groups.items():
            expected = []
            for prompt in prompts:
                out = model.generate(torch.tensor([prompt], device=model.device), **options)
                expected.append(out[0, len(prompt) :].tolist())
            batch = padded(prompts, pad, model.device)
            for strategy in arguments.strategies.split(","):
                for k in map(int, arguments.ks.split(",")):
                    for s in map(float, arguments.ss.split(",")):
                        pillar = pillarattn.SelfSpeculativeGenerator(
                            k, s, strategy, min_budget=arguments.min_budget, recent=4, sink=1
                        )
                        begun = time.perf_counter()
                        out = model.generate(**batch, **options, assistant=pillar)
                        seconds = time.perf_counter() - begun
                        found = []
                        for row, prompt in enumerate(prompts):
                            got = out[row, batch["input_ids"].shape[1] :].tolist()
                            first = first_difference(model, prompt, expected[row], got)
                            tokens += len(got)
                            if first is not None:
                                found.append({"row": row, **first})
                        differing += len(found)
                        counters = pillar.stats.to_dict()
                        del counters["accepted_per_round"]
                        line = {
                            "group": name,
                            "prompts": len(prompts),
                            "strategy": strategy,
                            "k": k,
                            "s": s,
                            "differences": found,
                            "seconds": round(seconds, 2),
                            **counters,
                        }
                        record.write(json.dumps(line) + "\n")
                        record.flush()
                        print(
                            f"{name:9} {strategy:9} k={k} s={s:<4} {len(found)} differing rows  "
                            f"acceptance {pillar.stats.acceptance_rate:.3f}  {seconds:.1f} s",
                            flush=True,
                        )
    rows = sum(len(p) for p in groups.values())
    print(f"{rows} prompts, {tokens} tokens compared, {differing} rows with a difference")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
