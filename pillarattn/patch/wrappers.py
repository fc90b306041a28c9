"""Models inside wrappers, and models whose weights hooks fetch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def inner_model(model: Any) -> Any:
    """Return the transformers model inside a PEFT wrapper or a `torch.compile`d one."""
    while True:
        if isinstance(original := getattr(model, "_orig_mod", None), nn.Module):
            model = original
        elif type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def weights_device(model: nn.Module) -> torch.device:
    """Return the device that inputs belong on, also where hooks fetch weights for each pass."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    hook = getattr(embedding, "_hf_hook", None) or getattr(model, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device)
    return embedding.weight.device
