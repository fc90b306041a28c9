"""What a patched model carries: its original configs, and the switch to the twin attention."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from pillarattn.errors import UnsupportedModelError, UnsupportedOptionError
from pillarattn.patch.attention_function import register
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import PreTrainedModel, cache_keyword
from pillarattn.patch.compiled import EagerSwitch
from pillarattn.patch.compiled_parts import CompiledParts
from pillarattn.patch.current_pass import speculating
from pillarattn.patch.decode import decode
from pillarattn.patch.fused_layers import FusedSwitch
from pillarattn.patch.strict import strict_products
from pillarattn.patch.support import SUPPORTED_ATTENTION
from pillarattn.patch.weight_memory import LaidTogether

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
        joined: whose weights `patch` has moved, so that they lie together.
        is_joined_copy: whether that was so in the model that this one is a copy of.
        info: what `describe` found.
        dense_reason: why sparse attention cannot act in this model, or None if it can.
        lockstep: whether all rows must stand at the same position, because the model counts it.
        pads_foreign: whether prompts with padding need the model's own attention and cache.
        padding_reason: why prompts with padding are refused, or None.
        stores_latents: whether the cache holds what keys are made of, and not keys.
        proven_passes: kinds of recorded passes that were found equal to eager ones.
        proven_code: what the model ran then.
    """

    configs: list[tuple[Any, Any]]
    fields: list[dict[str, Any]]
    had_generate: Any = None
    kernels: str = "auto"
    joined: list[LaidTogether] = field(default_factory=list)
    is_joined_copy: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    dense_reason: str | None = None
    lockstep: bool = False
    pads_foreign: bool = False
    padding_reason: str | None = None
    stores_latents: bool = False
    own_code: EagerSwitch = field(default_factory=EagerSwitch)
    proven_passes: set[Any] = field(default_factory=set)
    proven_code: int | None = None
    fused: FusedSwitch = field(default_factory=FusedSwitch)
    compiled: CompiledParts = field(default_factory=CompiledParts)
    users: int = 0
    originals: list[str] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # The weights of a copy are its own; one that was stored and loaded may have kept the order.
        is_joined = bool(self.joined) or self.is_joined_copy
        return {**vars(self), "joined": [], "is_joined_copy": is_joined}

    def decode(
        self, generator: Any, model: PreTrainedModel, input_ids: Any, **prepared: Any
    ) -> Any:
        """Run `generator` on the model, with its twin attention switched on where that can act.

        Raises:
            UnsupportedOptionError: before any compute, for a prompt or a strategy that does not fit
                the model, or a cache that another generation is using.
        """
        mask = prepared.get("attention_mask")
        is_padded = mask is not None and not bool(mask.all())
        if is_padded and self.padding_reason is not None:
            raise UnsupportedOptionError(
                f"{self.padding_reason}; pass rows of one length, or one row at a time"
            )
        # Sparse drafts drop padding from the cache, and with it from the positions counted there.
        own = is_padded and (self.lockstep or self.pads_foreign)
        sparse = self.dense_reason is None and not own
        strategy = generator.new_strategy()
        if sparse and self.stores_latents and (strategy.needs_keys or strategy.needs_values):
            raise UnsupportedOptionError(
                f"strategy={strategy.name!r} looks at cached keys, and {type(model).__name__} "
                "caches latents that they are made of; use a strategy that ranks by scores or by "
                "position, such as 'pillar' or 'streaming'"
            )
        given = prepared.get(cache_keyword())
        with ExitStack() as stack:
            if isinstance(given, PillarCache):
                stack.enter_context(given.in_use())
            if sparse:
                stack.enter_context(self.active())
            stack.enter_context(self.own_code.active(model))
            if generator.config.strict:
                stack.enter_context(strict_products())
            if generator.config.compile:
                stack.enter_context(self.compiled.active(model))
            return decode(
                generator,
                model,
                input_ids,
                kernels=self.kernels,
                sparse=sparse,
                lockstep=self.lockstep,
                **prepared,
            )

    def proven_with(self, code: Any) -> set[Any]:
        """Return the kinds of passes proven while the model ran `code`, to which runs add.

        What was proven of other code says nothing any more. None proves nothing beyond a run.
        """
        if code is None:
            return set()
        if hash(code) != self.proven_code:
            # No code is held itself: it may be of a kind that cannot be pickled.
            self.proven_code, self.proven_passes = hash(code), set()
        return self.proven_passes

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
            with speculating():
                yield
        finally:
            with _SWITCH:
                self.users -= 1
                if self.users == 0:
                    for own, original in zip(copies, self.originals, strict=True):
                        own._attn_implementation_internal = original
