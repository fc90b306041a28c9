"""What a measurement ran on: versions, device and threads."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

PACKAGES = ("pillarattn", "torch", "transformers", "triton")


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the versions (None: not installed), the device's name and the CPU threads in use."""
    where = torch.device(device)
    name = platform.processor() or platform.machine()
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
    return {
        "versions": {"python": platform.python_version()}
        | {p: package_version(p) for p in PACKAGES},
        "platform": platform.platform(),
        "device": str(where),
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def package_version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
