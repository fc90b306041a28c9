"""Tokens of the engine in half precision, strict and not, and what strict mode costs.

    CUBLASLT_WORKSPACE_SIZE=1 python -m benchmarks.strict_engine --batch 64 --new-tokens 512 \\
        --out benchmarks/results/strict_engine_h200.jsonl

Strict: requests that differ between drafts and none, and between a full batch and each one alone;
there must be none. Default: requests that differ between drafts and none, and with greedy decoding
at each first difference the gap of the two tokens' logits. Seconds are of decode, of a second run:
the first one compiles and records.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import pillarattn
from benchmarks.shape_models import random_model
from benchmarks.strict_equality import differences
from pillarattn.evaluation.demo_model import load_model
from pillarattn.evaluation.engine_bench import WARM_TOKENS, timed_requests
from pillarattn.evaluation.environment import environment, source_commit
from pillarattn.evaluation.generate_bench_cell import prompts
from pillarattn.evaluation.results import append_record

KIND = "strict-engine"
Tokens = list[list[int]]
# Each with whether it is strict and whether it drafts; what comes after is compared with plain.
VARIANTS = {
    "strict plain": (True, False), "strict": (True, True),
    "plain": (False, False), "default": (False, True),
}  # fmt: skip
ALONE = "strict plain, alone"


def main() -> None:
    given = parsed()
    model, texts = _model_and_texts(given)
    pillarattn.patch(model, join_weights=given.device == "cuda")
    record: dict[str, Any] = {
        "kind": KIND, "environment": environment(model.device), "commit": source_commit(),
        "settings": {**vars(given), "out": None}, "runs": {},
    }  # fmt: skip
    tokens: dict[str, Tokens] = {}
    for name, (strict, drafts) in VARIANTS.items():
        engine = new_engine(given, model, given.batch, strict=strict, drafts=drafts)
        run_all(given, engine, texts, warm=True)
        tokens[name], record["runs"][name] = run_all(given, engine, texts)
        del engine
    engine = new_engine(given, model, 1, strict=True, drafts=False)
    tokens[ALONE] = [
        run_all(given, engine, texts[i : i + 1], first=i)[0][0] for i in range(given.alone)
    ]
    del engine
    for one, other in (("strict", "strict plain"), ("strict", ALONE), ("default", "plain")):
        found = compared(given, model, texts, tokens[one], tokens[other])
        record[f"{one} against {other}"] = found
        print(
            one, "against", other, {k: v for k, v in found.items() if k not in ("gaps", "places")}
        )
    for name, run in record["runs"].items():
        print(f"{name}: {run['tokens'] / run['seconds']:,.0f} tokens/s")
    if given.out:
        append_record(given.out, record)
    if any(record[f"strict against {other}"]["rows"] for other in ("strict plain", ALONE)):
        raise SystemExit("strict tokens differ")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["smollm2", "8b"], default="smollm2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--alone", type=int, default=4, help="requests that run alone, too")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prefill-chunk", type=int, default=2048, help="strictly, too")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--s", type=float, default=0.05)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if not 0 <= given.alone <= given.batch:
        parser.error(f"--alone must be 0 to --batch, {given.batch}, got {given.alone}")
    return given


def new_engine(given: argparse.Namespace, model: Any, batch: int, **ways: bool) -> Any:
    """Return an engine with room for all requests at their full length."""
    room = -(-(given.length + given.new_tokens + given.k + 1) // 16) * 16
    config = pillarattn.EngineConfig(
        kv_tokens=batch * room, max_batch=batch, prefix_cache=False, seed=0,
        speculative=ways["drafts"], prefill_chunk=given.prefill_chunk,
        pillar=pillarattn.PillarConfig(k=given.k, s=given.s, strict=ways["strict"]),
    )  # fmt: skip
    return pillarattn.Engine(model, config)


def run_all(
    given: argparse.Namespace, engine: Any, texts: Tokens, *, first: int = 0, warm: bool = False
) -> tuple[Tokens, dict[str, Any]]:
    """Return the new tokens of requests, of which `first` is the seed of the first, and times."""
    params = [
        pillarattn.SamplingParams(
            max_tokens=given.new_tokens, temperature=given.temperature, ignore_eos=True, seed=i
        )
        for i in range(first, first + len(texts))
    ]
    if warm:
        fewer = min(WARM_TOKENS, given.new_tokens)
        params = [replace(one, max_tokens=fewer) for one in params]
    return timed_requests(engine, texts, params, len(texts))


def compared(
    given: argparse.Namespace, model: Any, texts: Tokens, ours: Tokens, theirs: Tokens
) -> dict[str, Any]:
    """Return how many of the requests that both ran differ: see `differences`."""
    together = list(zip(texts, ours, theirs, strict=False))
    mine, other = (
        torch.tensor([pair[0] + pair[which] for pair in together], device=model.device)
        for which in (1, 2)
    )
    found = differences(model, mine, other, given.length)
    if given.temperature > 0:
        # Noise decides beside logits.
        found |= {"median_gap": None, "largest_gap": None, "gaps": None}
    return found


def _model_and_texts(given: argparse.Namespace) -> tuple[Any, Tokens]:
    if given.shape == "smollm2":
        # The real model: a random one repeats itself or ties.
        model, tokenizer = load_model("smollm2", device=given.device, dtype=given.dtype)
        return model, prompts(tokenizer, given.batch, given.length, shared=False).tolist()
    model = random_model(given.shape, torch.device(given.device))
    noise = torch.Generator().manual_seed(0)
    shape = given.batch, given.length
    return model, torch.randint(1, model.config.vocab_size, shape, generator=noise).tolist()


if __name__ == "__main__":
    main()
