"""Whether a model still runs what it did: else what was recorded or copied of it is void."""

from __future__ import annotations

from enum import Enum
from itertools import chain
from typing import Any

from torch import Tensor, nn

from pillarattn.patch.fused_layers import is_switch
from pillarattn.patch.kept_passes import code_of

# Passes from one brief look to the next: it takes the host longer than some passes should.
EVERY = 16
# Kinds of tensors that lie at one place.
_PLAIN = (Tensor, nn.Parameter)


class Change(Enum):
    """What has become of a model since the last look.

    `WEIGHTS` may have been written to where they are; `CODE`: it runs something else, or reads
    weights elsewhere.
    """

    NONE = "none"
    WEIGHTS = "weights"
    CODE = "code"


class ModelWatch:
    """Looks at a model before its passes: closely where somebody asks, else briefly now and then.

    A brief look sees hooks, forwards and parts that come and go, other weights, weights that lie
    elsewhere, and writes that PyTorch counts. Settings of modules, such as which adapter acts, and
    writes to `.data` need a close one: `ask` for it wherever they may have happened.

    Args:
        model: a module. What other threads switch on and off must stand the same way at each look.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Each question is an object of its own, so that none is lost where one asks while another
        # asks or looks.
        self._asked: object = object()
        self._answered: object = None
        self._passes = 0
        self._code: Any = None
        self._parts: list[Any] = []
        self._versions: list[int] = []

    def ask(self) -> None:
        """Look closely the next time; any thread may ask."""
        self._asked = object()

    def forget(self) -> None:
        """Find other code the next time, whatever there is."""
        self._code = None
        self.ask()

    def is_due(self) -> bool:
        """Count a pass, and return whether to look before it."""
        self._passes += 1
        return self._asked is not self._answered or self._passes % EVERY == 0

    def look(self) -> Change:
        """Return what has changed since the last look; the first one finds other code."""
        before, self._answered = self._answered, self._asked
        if self._answered is before and self._brief() == self._parts:
            versions = self._written()
            if versions == self._versions:
                return Change.NONE
            self._versions = versions
            return Change.WEIGHTS
        before, self._code = self._code, _kind(self._model)
        self._survey()
        # Of code that nothing tells, nothing is known to be as it was.
        return Change.WEIGHTS if before is not None and self._code == before else Change.CODE

    def _survey(self) -> None:
        """Keep at hand what a brief look goes through, and what it finds now."""
        modules = list(self._model.modules())
        self._fields = [vars(module) for module in modules]
        self._hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        held = [d for m in modules for d in (m._modules, m._parameters, m._buffers)]
        self._held = [d for d in held if d]
        self._counted = [
            (d, name)
            for d in self._held
            for name, part in d.items()
            if isinstance(part, Tensor) and not part.is_inference()
        ]
        self._parts, self._versions = self._brief(), self._written()

    def _brief(self) -> list[int]:
        """Return what changes with a model's parts; it keeps no tensor alive."""
        found = [sum(map(len, self._hooks))]
        found += map(id, chain.from_iterable([d.values() for d in self._held]))
        found += [_place(t) for d in self._held for t in d.values() if type(t) in _PLAIN]
        forwards = [d.get("forward") for d in self._fields if "forward" in d]
        # Other threads put switches in, and take them out meanwhile.
        found += [id(one) for one in forwards if one is not None and not is_switch(one)]
        return found

    def _written(self) -> list[int]:
        """Return how often tensors were written to; they are those of the last survey."""
        return [d[name]._version for d, name in self._counted]  # type: ignore[union-attr]


def _place(tensor: Any) -> int:
    # Of what lies nowhere there is no place.
    return 0 if tensor.device.type == "meta" else int(tensor.data_ptr())


def _kind(model: nn.Module) -> Any:
    """Return what decides which kernels run over which memory; None: nothing can tell."""
    code = code_of(model)
    tensors = [*model.parameters(), *model.buffers()]
    if code is None or any(type(t) not in _PLAIN for t in tensors):
        return None
    return code, tuple((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
