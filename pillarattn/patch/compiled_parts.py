"""Norms and feed-forward parts of a model's layers under `torch.compile`, while a run asks for it.

Attention stays outside: a compiler would stop there, and rounds read other numbers of keys. What
is compiled takes any number of rows, so that prompts, drafts and verify passes share it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import nn

from pillarattn.patch.model_parts import hooked, modules_of

CALL = "_compiled_call_impl"
NAMES = ("norm", "mlp", "feedforward")
# Whether this thread's run wants compiled parts: threads share a model's modules.
_WANTED: ContextVar[bool] = ContextVar("pillarattn_wants_compiled_parts", default=False)
# Guards the counters of all models, as in `compiled.py`.
_SWITCH = threading.Lock()


class CompiledParts:
    """Puts compiled code in front of parts of a model and takes it off; threads share the switch.

    What was compiled is kept for the next run. Code that the compiler does not take runs as it is,
    after one warning. Copies and pickles begin empty.

    Attributes:
        reason: why nothing is compiled any more, or None.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._users = 0
        self._made: dict[int, Callable[..., Any]] = {}
        self._switched: list[nn.Module] = []

    def __reduce__(self) -> tuple[type[CompiledParts], tuple[()]]:
        return CompiledParts, ()

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Run this thread's calls of the parts compiled inside."""
        with _SWITCH:
            if self._users == 0:
                for part in compilable_parts(model):
                    self._switched.append(part)
                    vars(part)[CALL] = self._call_of(part)
            self._users += 1
        wanted = _WANTED.set(True)
        try:
            yield
        finally:
            _WANTED.reset(wanted)
            with _SWITCH:
                self._users -= 1
                if self._users == 0:
                    for part in self._switched:
                        vars(part).pop(CALL, None)
                    self._switched.clear()

    def _call_of(self, part: Any) -> Callable[..., Any]:
        """Return what a part's call is in the meantime."""
        inside = modules_of(part)

        def call(*arguments: Any, **named: Any) -> Any:
            # What a run puts in front of a layer, such as rounded weights, is for its passes alone.
            is_own = not any("forward" in vars(one) for one in inside)
            if not (_WANTED.get() and is_own and self.reason is None):
                return part._call_impl(*arguments, **named)
            try:
                if id(part) not in self._made:
                    self._made[id(part)] = torch.compile(part.forward, dynamic=True)
                return self._made[id(part)](*arguments, **named)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                found = part._call_impl(*arguments, **named)
                # Its own code takes what the compiler's does not.
                self._give_up(part, error)
                return found

        return call

    def _give_up(self, part: nn.Module, error: Exception) -> None:
        first = (str(error).strip() or "no message").splitlines()[0]
        self.reason = f"{type(part).__name__}: {type(error).__name__}: {first}"
        warnings.warn(
            f"compile=True has no effect here, with the same output: {self.reason}",
            RuntimeWarning,
            stacklevel=3,
        )


def wants_compiled() -> bool:
    """Return whether this thread's run wants compiled parts."""
    return _WANTED.get()


def compilable_parts(model: Any) -> list[nn.Module]:
    """Return norms and feed-forward parts of the layers of a Hugging Face model.

    They are told by their names and by taking rows alone: what attends or keeps states is given
    more. Left out is also what chooses experts, has hooks or a forward of its own, is compiled
    already, or is one kernel of PyTorch's anyway.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    layers = [
        layer
        for module in modules_of(model)
        if isinstance(module, nn.ModuleList) and len(module) == count
        for layer in module
    ]
    parts = {id(part): part for layer in layers for part in layer.children()}
    return [part for part in parts.values() if _is_of_rows(part) and _is_as_made(part)]


def _is_of_rows(part: nn.Module) -> bool:
    kind = type(part)
    is_named = any(name in kind.__name__.lower() for name in NAMES)
    is_own_kernel = kind.__module__.startswith("torch.nn")
    # As the class has it: an instance's own forward is judged apart.
    takes = len(signature(kind.forward).parameters) - 1
    chooses = any(isinstance(one, nn.ModuleList) for one in modules_of(part))
    return is_named and takes == 1 and not (chooses or is_own_kernel)


def _is_as_made(part: nn.Module) -> bool:
    inside = modules_of(part)
    replaced = any("forward" in vars(one) or vars(one).get(CALL) is not None for one in inside)
    hosted = any(hasattr(one, "_hf_hook") for one in inside)
    return not (replaced or hosted or hooked(inside))
