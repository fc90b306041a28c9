"""Where a round of `generate(assistant=)` spends its time on a GPU: host, passes, kernels.

    python -m benchmarks.round_profile --batch 16 --length 8192 --out profile.json

The model has a named shape and random weights, so that nothing has to be loaded: times of passes
are those of the real model, acceptance is not. Records milliseconds of a round and of its phases,
its kernels by total time, and beside them the prompt, a step and the peak memory of plain
`generate` and of plain decoding by the same recorded passes (k = 0).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import pillarattn
from pillarattn.evaluation.batch_timing import timed_batch
from pillarattn.evaluation.environment import environment, source_commit

# Tokens of a run whose every kernel is recorded, or launched one by one.
FEW = 8
# Tokens of a run that is timed as a whole.
STEPS = 33

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--strategy", default="pillar")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = random_model(given.shape)
    pillarattn.patch(model, join_weights=True)
    ids = torch.randint(1, model.config.vocab_size, (given.batch, given.length), device="cuda")
    record: dict[str, Any] = {
        "kind": "round-profile", "environment": environment(model.device),
        "commit": source_commit(), "settings": {**vars(given), "out": None},
    }  # fmt: skip
    record["model's own"] = measure_plain(model, ids, None)
    record["own plain"] = measure_plain(model, ids, pillarattn.SelfSpeculativeGenerator(k=0))
    for graphs in (True, False) if given.eager else (True,):
        record["graphs" if graphs else "eager"] = measure(model, ids, given, graphs=graphs)
    print(json.dumps(record))
    if given.out:
        with given.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def random_model(shape: str) -> Any:
    """Return a model of a named shape with random weights, in bf16 on the GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=65536, eos_token_id=None, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def measure_plain(model: Any, ids: torch.Tensor, pillar: Any) -> dict[str, float]:
    """Return seconds of the prompt, milliseconds of a plain step, and peak bytes; of a 2nd run."""
    extra = {} if pillar is None else {"assistant": pillar}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        _, times = timed_batch(
            model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            end_tokens=frozenset(), max_new_tokens=STEPS, do_sample=False, **extra,
        )  # fmt: skip
    if pillar is not None:
        pillar.free()
    return {
        "prefill_seconds": times.prefill_seconds,
        "step_ms": 1000 * times.decode_seconds / (STEPS - 1),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def measure(model: Any, ids: torch.Tensor, given: Any, *, graphs: bool) -> dict[str, Any]:
    """Return milliseconds of a round, of its phases where each is waited for, and of kernels."""
    found: dict[str, Any] = {}
    pillar = pillarattn.SelfSpeculativeGenerator(
        k=given.k, strategy=given.strategy, cuda_graphs=graphs
    )
    options = {
        "max_new_tokens": given.new_tokens if graphs else FEW, "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }  # fmt: skip
    model.generate(ids, **options, assistant=pillar)
    torch.cuda.reset_peak_memory_stats()
    for watched in (False, True):
        pillar.synchronise = watched
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(ids, **options, assistant=pillar)
        torch.cuda.synchronize()
        stats = pillar.stats
        rounds = max(len(row) for row in stats.accepted_per_round)
        seconds = time.perf_counter() - begun - stats.prefill_seconds
        found["watched_round_ms" if watched else "round_ms"] = 1000 * seconds / rounds
        found["rounds"] = rounds
    for phase in ("draft", "verify", "accept", "select"):
        found[f"{phase}_ms"] = 1000 * getattr(stats, f"{phase}_seconds") / rounds
    found["prefill_seconds"] = stats.prefill_seconds
    found["peak_bytes"] = torch.cuda.max_memory_allocated()
    if graphs:
        found["kernels"] = kernels(model, ids, {**options, "max_new_tokens": FEW}, pillar)
    pillar.free()
    return found


def kernels(model: Any, ids: torch.Tensor, options: dict[str, Any], pillar: Any) -> Any:
    """Return the kernels of a run by total device time: name, milliseconds, calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        model.generate(ids, **options, assistant=pillar)
    table = sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
    return [(one.key[:90], one.self_device_time_total / 1000, one.count) for one in table[:40]]


if __name__ == "__main__":
    main()
