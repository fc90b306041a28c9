"""What a cell of `engine_shapes` needs, and what theory expects of it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.replayed_engine import WARM_ROUNDS
from benchmarks.shape_models import kv_bytes_per_token
from pillarattn.evaluation.machine_ceilings import measure_ceilings
from pillarattn.theory import (
    Hardware,
    Workload,
    custom_hardware,
    efficiency_named,
    expect,
    plain_step,
    shape_from_model,
    speedup_by_share,
)

BASELINE = "baseline"
# What theory calls the schedule of a variant.
SCHEDULES = {
    "speculative": "unified", "delayed": "delayed", "cruise": "unified", "lockstep": "lockstep",
}  # fmt: skip
EFFICIENCIES = "ideal", "kernels"
# Of all requests together.
LEAST_ROUNDS = 40
# Activations, work space and recordings, beside what is counted.
SPARE_BYTES = 4e9

Record = dict[str, Any]


def timed_rounds(given: argparse.Namespace, batch: int) -> int:
    """Return how many rounds are timed: of small batches more, for the mean of their acceptance."""
    return max(int(given.rounds), LEAST_ROUNDS // batch)


def new_tokens(given: argparse.Namespace, batch: int) -> int:
    """Return more tokens than a request can get: a round emits no more than it has steps."""
    rounds = WARM_ROUNDS[1] + timed_rounds(given, batch) + given.profiled + 3
    return int(rounds * (given.k + 1))


def room(given: argparse.Namespace, batch: int, length: int) -> int:
    """Return the tokens of a request's whole blocks."""
    return -(-(length + new_tokens(given, batch) + given.k + 1) // 16) * 16


def needed_bytes(
    given: argparse.Namespace, model: Any, batch: int, length: int, name: str
) -> float:
    """Return the memory that a variant takes beside the model: its cache, scores and logits."""
    config, tokens = model.config, batch * length
    scores = logits = 0.0
    if name != BASELINE:
        tokens, rows = batch * room(given, batch, length), given.k + 1
        scored = batch if name == "lockstep" else -(-batch // rows) + 4
        heads = config.num_hidden_layers * config.num_key_value_heads
        # Sizes have some room to spare, and the old memory is there while the new one is made.
        scores = 0 if name not in SCHEDULES else 4 * 2.5 * heads * scored * rows * length
        # In the model's type and in fp32, as recorded and as copied.
        logits = 12 * (batch + scored * rows) * config.vocab_size
    needed = tokens * kv_bytes_per_token(model) + scores + logits
    return needed + (SPARE_BYTES if model.device.type == "cuda" else 0)


def measured_ceilings(device: torch.device) -> Hardware:
    """Return the device's measured ceilings: the fastest read, and the fastest product."""
    if device.type != "cuda":
        return measure_ceilings(device, megabytes=32, size=256, repeats=2)
    from pillarattn.evaluation.kernel_bench_timing import ReadCeiling, matrix_teraflops

    memory = torch.cuda.get_device_properties(device).total_memory
    return custom_hardware(
        torch.cuda.get_device_name(device), memory=float(memory), flops=1e12 * matrix_teraflops(),
        bandwidth=1e12 * ReadCeiling().terabytes_per_second(),
    )  # fmt: skip


def expected(
    given: argparse.Namespace, model: Any, ceilings: Hardware, batch: int, length: int, name: str,
    step_ms: float,
) -> Record:  # fmt: skip
    """Return the floor of a plain step, or the speed-up that theory gives a speculative one."""
    shape = shape_from_model(model)
    if name not in SCHEDULES:
        floor = 1000 * plain_step(shape, batch, length).bytes / ceilings.bandwidth
        return {"floor_ms": floor, "floor_share": floor / step_ms}
    found = {}
    for efficiency in EFFICIENCIES:
        workload = Workload(
            shape, ceilings, batch, length, efficiency_named(efficiency), SCHEDULES[name],
            given.min_budget,
        )  # fmt: skip
        found[efficiency] = expect(workload, k=given.k, s=given.s, accepted=given.rate * given.k)
    return {"predicted": {e: one.speedup for e, one in found.items()}}


def predicted_by_share(given: argparse.Namespace, done: dict[str, Record]) -> Record:
    """Return theory's speed-up from the share of the plain step that is attention, if known."""
    plain = done.get("plain", {})
    if not plain.get("attention_ms"):
        return {}
    share = plain["attention_ms"] / plain["busy_ms"]
    speedup = speedup_by_share(given.k, given.rate, given.s, share)
    return {"attention_share": share, "predicted_by_share": speedup}
