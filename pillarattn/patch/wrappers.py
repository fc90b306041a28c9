"""Models inside wrappers, and models whose code has been compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def own_code(model: nn.Module) -> Iterator[None]:
    """Let compiled parts of the model run their Python code inside the block.

    A pass that drafts has another cache, mask and shape than the code was compiled for; it would be
    traced anew in every round.
    """
    if any(_is_compiled(module) for module in model.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def weights_device(model: nn.Module) -> torch.device:
    """Return the device that inputs belong on, also where hooks fetch weights for each pass."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device)
    return embedding.weight.device


def _is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(
        forward, "_torchdynamo_orig_callable"
    )
