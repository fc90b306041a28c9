"""What a measurement ran on: versions, device and threads."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("pillarattn", "torch", "transformers", "triton")


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the versions (None: not installed), the device's name and the CPU threads in use."""
    where = torch.device(device)
    name = cpu_name()
    if where.type == "cuda":
        name = torch.cuda.get_device_name(where)
    return {
        "versions": {"python": platform.python_version()}
        | {p: package_version(p) for p in PACKAGES}
        # The metadata of some builds leaves the build's own suffix out.
        | {"torch": str(torch.__version__)},
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


def cpu_name() -> str:
    """Return the processor's name as the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (named or [platform.processor() or platform.machine()])[0]


def machine() -> dict[str, Any]:
    """Return what else a timing depends on: cores, memory in bytes (None: unknown), GPUs."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        memory = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_bytes": memory, "gpus": gpus}


def source_commit() -> str | None:
    """Return the commit that the package was imported from, or None outside a checkout.

    "-dirty" is added where files differ from the commit.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty",
               "--exclude=*"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
