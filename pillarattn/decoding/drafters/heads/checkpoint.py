"""Reads the folders that heads are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return `config.json`; missing, it raises `FileNotFoundError`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the folder of a downloaded head")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Return the tensors of the first weight file there is, on the CPU; no pickled code runs.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in WEIGHT_FILES:
        path = Path(folder) / name
        if path.suffix == ".safetensors" and path.is_file():
            return load_file(path)
        if path.is_file():
            weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
            return weights
    raise FileNotFoundError(
        f"{folder} has none of {', '.join(WEIGHT_FILES)}; give the folder of a downloaded head"
    )


def fill(module: nn.Module, weights: dict[str, Tensor], *, dtype: torch.dtype | None) -> None:
    """Put `weights` into a module of the same names and shapes.

    Args:
        module: its floating parameters take the weights' dtype, or `dtype`.
        weights: exactly one for each parameter and buffer.
        dtype: see above.

    Raises:
        ValueError: names or shapes differ; the message lists them.
    """
    wanted = module.state_dict()
    wrong = [f"{name} is missing" for name in sorted(set(wanted) - set(weights))]
    wrong += [f"{name} has no place" for name in sorted(set(weights) - set(wanted))]
    wrong += [
        f"{name} has shape {list(weights[name].shape)}, wanted {list(wanted[name].shape)}"
        for name in sorted(set(wanted) & set(weights))
        if weights[name].shape != wanted[name].shape
    ]
    if wrong:
        raise ValueError(f"the checkpoint does not fit {type(module).__name__}: {'; '.join(wrong)}")
    floating = next(t.dtype for t in weights.values() if t.is_floating_point())
    module.to(dtype or floating)
    module.load_state_dict(weights)
