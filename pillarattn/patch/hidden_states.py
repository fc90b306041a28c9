"""Catches what the layers of a Hugging Face model say, for draft heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pillarattn.errors import UnsupportedModelError
from pillarattn.patch.compat import PreTrainedModel


class HiddenTap:
    """Hooks on a decoder that keep the input of some layers, or the decoder's output.

    Args:
        model: its decoder must have `layers`.
        layers: places as in `WatchedTarget.watch`.

    Raises:
        UnsupportedModelError: the decoder is built otherwise.
    """

    def __init__(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        decoder = model.get_decoder()
        stack = getattr(decoder, "layers", None)
        if not isinstance(stack, nn.ModuleList):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no list of decoder layers, whose states a draft head "
                "needs; use another drafter"
            )
        self._caught: dict[int, list[Tensor]] | None = None
        self._layers = layers
        self._hooks = []
        for at in set(layers):
            if at == len(stack):
                self._hooks.append(decoder.register_forward_hook(self._output_hook(at)))
            else:
                hook = self._input_hook(at)
                self._hooks.append(stack[at].register_forward_pre_hook(hook, with_kwargs=True))

    def _input_hook(self, at: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._caught is not None:
                states = args[0] if args else kwargs["hidden_states"]
                self._caught.setdefault(at, []).append(states.detach())

        return keep

    def _output_hook(self, at: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._caught is not None:
                self._caught.setdefault(at, []).append(output[0].detach())

        return keep

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Keep the states of the passes inside the block; the chunks of a prompt are joined."""
        self._caught = {}
        try:
            yield
            parts = [torch.cat(self._caught[at], dim=1) for at in self._layers]
            # Layers may sit on several devices.
            self.states = torch.cat([part.to(parts[0].device) for part in parts], dim=-1)
        finally:
            self._caught = None

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
