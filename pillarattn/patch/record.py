"""What a patched model carries: its original configs, and the switch to the twin attention."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pillarattn.errors import UnsupportedModelError
from pillarattn.patch.attention_function import register
from pillarattn.patch.compat import PreTrainedModel
from pillarattn.patch.decode import decode
from pillarattn.patch.support import SUPPORTED_ATTENTION

RECORD = "pillarattn_record"
# Guards the counters of all records: they change once a generation, and a lock cannot be pickled.
_SWITCH = threading.Lock()


@dataclass
class PatchRecord:
    """Ties a model to what it was.

    Attributes:
        configs: pairs (original, the model's own copy), so that unpatching puts the originals back.
        fields: the originals' fields at that time, to see later what the model itself changed.
        had_generate: the instance's own `generate` before, or None.
        kernels: the `kernels=` of `patch`.
        info: what `describe` found.
    """

    configs: list[tuple[Any, Any]]
    fields: list[dict[str, Any]]
    had_generate: Any = None
    kernels: str = "auto"
    info: dict[str, Any] = field(default_factory=dict)
    users: int = 0
    originals: list[str] = field(default_factory=list)

    def decode(
        self, generator: Any, model: PreTrainedModel, input_ids: Any, **prepared: Any
    ) -> Any:
        """Run `generator` on the model with its twin attention switched on."""
        with self.active():
            return decode(generator, model, input_ids, kernels=self.kernels, **prepared)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch the model to its twin attention; concurrent runs share the switch.

        The switch is a name in the model's own config, so that no other model sees it, and forwards
        that do not belong to a run pass through the twin to the original.
        """
        copies = [own for _, own in self.configs]
        with _SWITCH:
            if self.users == 0:
                self.originals = [own._attn_implementation_internal for own in copies]
                for original in self.originals:
                    if original not in (*SUPPORTED_ATTENTION, None):
                        raise UnsupportedModelError(
                            f"attn_implementation={original!r} was set after patching; set one of "
                            f"{', '.join(map(repr, SUPPORTED_ATTENTION))}"
                        )
                for own, original in zip(copies, self.originals, strict=True):
                    if original is not None:
                        own._attn_implementation_internal = register(original)
            self.users += 1
        try:
            yield
        finally:
            with _SWITCH:
                self.users -= 1
                if self.users == 0:
                    for own, original in zip(copies, self.originals, strict=True):
                        own._attn_implementation_internal = original
