"""What theory expects of a cell: bounds for any machine, and a roofline for named GPUs."""

from __future__ import annotations

from typing import Any

import torch

from pillarattn.theory import (
    Hardware,
    Workload,
    attention_bound,
    expect,
    hardware_named,
    shape_from_model,
    weight_bound,
)

# What a driver calls a device, and what `theory` calls it; the first that fits counts.
_DEVICES = (
    ("H200", "H200-measured"),
    ("H100 PCIe", "H100-PCIe"),
    ("H100", "H100-SXM"),
    ("A100-SXM4-40GB", "A100-40GB"),
    ("A100", "A100-80GB"),
    ("B200", "B200"),
    ("L40S", "L40S"),
    ("RTX 4090", "RTX-4090"),
)


def device_hardware(device: torch.device) -> Hardware | None:
    """Return what theory knows about a device, or None (a CPU, or a GPU without a record)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = next((ours for theirs, ours in _DEVICES if theirs in name), None)
    return None if known is None else hardware_named(known)


def predicted_speedup(
    model: Any, *, batch: int, length: int, k: int, s: float, mean_accepted: float, min_budget: int
) -> dict[str, Any] | None:
    """Return the speed-up over plain decoding that a lossless roofline allows, or None.

    It is a ceiling: no launch costs, every read at full bandwidth. None where the device is not a
    named one, or the model's config does not say what theory needs.

    Args:
        batch: sequences that decode together.
        length: tokens that each holds.
        k: drafts a round, >= 1.
        s: share of the keys that a draft reads.
        mean_accepted: drafts accepted per round.
        min_budget: keys that a draft may always read, in tokens.
    """
    hardware = device_hardware(model.device)
    if hardware is None or k < 1:
        return None
    try:
        shape = shape_from_model(model)
    except ValueError:
        return None
    workload = Workload(shape, hardware, batch, max(1, length), min_budget=max(1, min_budget))
    found = expect(workload, k=k, s=s, accepted=min(mean_accepted, float(k)))
    return {"hardware": hardware.name, "length": length, "speedup": found.speedup}


def speedup_bounds(k: float, acceptance_rate: float, keys_share: float) -> tuple[float, float]:
    """Return the speed-ups where only the weights cost, and where only reading the cache costs.

    A measured speed-up of an engine without overheads lies between them.

    Args:
        k: drafts a round, a mean where it varies.
        acceptance_rate: accepted / drafted.
        keys_share: keys read over keys of full attention in draft steps, 0..1.
    """
    drafts = max(0, round(k))
    return (
        weight_bound(drafts, acceptance_rate),
        attention_bound(drafts, acceptance_rate, keys_share),
    )
