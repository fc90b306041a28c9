"""Models under `torch.compile`: while they speculate, their own Python code runs.

Rounds change their shapes, and a compiler would stop at our attention in every layer and compile
the pieces anew for each of them. A CUDA graph of the whole step serves better.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pillarattn.patch.model_parts import modules_of

# Guards the counters of all models: they change once a generation, and a lock cannot be pickled.
_SWITCH = threading.Lock()


@dataclass
class EagerSwitch:
    """Takes compiled calls off a model and puts them back; concurrent runs share the switch."""

    users: int = 0
    taken: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Run every module's own code inside."""
        with _SWITCH:
            if self.users == 0:
                self._take_off(model)
            self.users += 1
        try:
            yield
        finally:
            with _SWITCH:
                self.users -= 1
                if self.users == 0:
                    for module, name, compiled in self.taken:
                        vars(module)[name] = compiled
                    self.taken.clear()

    def _take_off(self, model: nn.Module) -> None:
        for module in modules_of(model):
            own = vars(module)
            # `module.compile()`, and `module.forward = torch.compile(module.forward)`.
            compiled, forward = own.get("_compiled_call_impl"), own.get("forward")
            if compiled is not None:
                self._take(own, module, "_compiled_call_impl", None)
            if forward is not None and hasattr(forward, "_torchdynamo_orig_callable"):
                self._take(own, module, "forward", forward._torchdynamo_orig_callable)

    def _take(self, own: dict[str, Any], module: nn.Module, name: str, eager: Any) -> None:
        self.taken.append((module, name, own[name]))
        own[name] = eager
