"""The attention function and its mask twin that Hugging Face models call while they speculate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pillarattn.datatypes import Phase
from pillarattn.errors import UnsupportedModelError
from pillarattn.modules.attention import keep_queries
from pillarattn.modules.step import AttentionOptions
from pillarattn.patch import borrowed_attention
from pillarattn.patch.autocast import as_attended
from pillarattn.patch.cache_adapter import ORIGIN
from pillarattn.patch.compat import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionInterface,
    AttentionMaskInterface,
)
from pillarattn.patch.current_pass import find_cache, speculates

PREFIX = "pillarattn_"
# Arguments that choose keys by themselves: sparse drafts would choose among what they left.
REFUSED_ARGUMENTS = ("indices", "block_indices")
# Arguments that the kernels do not implement: the model's own function gets the chosen keys.
BORROWED_ARGUMENTS = ("position_bias", "sinks")


@dataclass
class MaskDescriptor:
    """Stands in for a mask: sparse attention needs only its window, plain attention builds it.

    Models hand it through to their attention function untouched.
    """

    build: Callable[..., Any]
    arguments: dict[str, Any]
    ndim: int = 4
    part: Any = None
    _mask: Any = None
    _is_built: bool = False

    @property
    def window(self) -> int | None:
        """Positions that a query sees at most, or None."""
        return self.arguments.get("local_size")

    @property
    def is_chunked(self) -> bool:
        """Whether queries see the chunk of positions that they stand in, not a sliding window."""
        chunk = getattr(self.arguments.get("config"), "attention_chunk_size", None)
        return chunk is not None and chunk == self.window

    def mask(self) -> Any:
        """Return what the original mask function makes of the arguments; built once a forward."""
        if not self._is_built:
            self._mask = self.build(**self.arguments)
            if self.part is not None and self._mask is not None:
                self._mask = self._mask[self.part]
            self._is_built = True
        return self._mask

    def __getitem__(self, part: Any) -> MaskDescriptor:
        """Put off taking a part too: some models keep only the last queries' rows of a mask."""
        return MaskDescriptor(lambda **_: self.mask(), self.arguments, part=part)

    def sees(self, at: Tensor, key: Tensor) -> Tensor:
        """Whether the query at position `at` may look back as far as the key at `key`."""
        if self.window is None:
            return torch.ones((), dtype=torch.bool, device=key.device)
        if self.is_chunked:
            return key // self.window == at // self.window
        return key > at - self.window


def register(original: str) -> str:
    """Enter the twin functions that wrap the implementation `original`; return their name."""
    name = PREFIX + original
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(attention_forward, original))
        AttentionMaskInterface.register(name, partial(describe_mask, original))
    return name


def describe_mask(original: str, **arguments: Any) -> Any:
    """Mask twin: put off the building of `original`'s mask until somebody needs it.

    A thread that does not speculate gets the mask itself, which every attention function takes.
    """
    if original not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    build = ALL_MASK_ATTENTION_FUNCTIONS[original]
    if not speculates():
        return build(**arguments)
    offset = arguments.get("q_offset")
    if isinstance(offset, Tensor):
        # A static layer hands out its live length.
        arguments["q_offset"] = offset.clone()
    return MaskDescriptor(build, arguments)


def attention_forward(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention twin: draft and verify passes of a `PillarCache` go to `PillarAttention`.

    Everything else, a prefill included, goes to the implementation `original`, whose result is then
    bit for bit what it was.
    """
    described = attention_mask if isinstance(attention_mask, MaskDescriptor) else None
    cache, index = _origin(key)
    step = getattr(cache, "step", None)
    if cache is None or step is None:
        mask = attention_mask if described is None else described.mask()
        return original_function(original, module)(module, query, key, value, mask, **kwargs)
    options = attention_options(original, module, attention_mask, kwargs)
    layer = cache.layers[index]
    is_made = getattr(key, ORIGIN, None) is None
    query, key, value = as_attended(query, key, value)
    if is_made:
        layer.attended_heads = key.shape[1]
    is_chunked = described is not None and described.is_chunked
    borrows = is_chunked or any(kwargs.get(name) is not None for name in BORROWED_ARGUMENTS)
    if step.phase is Phase.PREFILL:
        layer.window = options.window
        # A chunk bounds what a layer reads, as a window does: such layers stay dense.
        layer.is_selectable = not is_chunked
        step.visited.append(index)
        if layer.holds_attended_keys and not borrows:
            keep_queries(query, step, index, options)
        mask = attention_mask if described is None else described.mask()
        return original_function(original, module)(module, query, key, value, mask, **kwargs)
    if kwargs.get("dropout"):
        raise UnsupportedModelError(
            f"{type(module).__name__} applies attention dropout; call model.eval() first"
        )
    if borrows:
        return borrowed_attention.attend(
            original_function(original, module),
            module,
            query,
            key,
            value,
            layer=layer,
            index=index,
            step=step,
            sees=_sees_all if described is None else described.sees,
            arguments=kwargs,
        )
    out = cache.attention(query, layer, step, index, options, (key, value))
    return out.transpose(1, 2).contiguous(), None


def _sees_all(at: Tensor, key: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=key.device)


def _origin(key: Tensor) -> tuple[Any, int]:
    """Return the cache and the layer that the keys come from; no cache if they come from none.

    Keys that a model makes of what its cache returned belong to the layer written last.
    """
    origin = getattr(key, ORIGIN, None)
    cache, index = origin or (find_cache(), 0)
    if cache is None:
        return None, 0
    if origin is None:
        if cache.written is None:
            return None, 0
        index = cache.written
    cache.written = None
    return cache, index


def attention_options(
    original: str, module: nn.Module, attention_mask: Any, kwargs: dict[str, Any]
) -> AttentionOptions:
    """Read what a layer asks of its attention.

    Raises:
        UnsupportedModelError: it asks for something that the kernels do not compute.
    """
    for name in REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to its attention, which sparse drafts "
                "cannot honour; use the model without assistant="
            )
    if isinstance(attention_mask, Tensor):
        raise UnsupportedModelError(
            f"{type(module).__name__} builds an attention mask of its own; "
            "use the model without assistant="
        )
    if isinstance(attention_mask, MaskDescriptor):
        window = attention_mask.window
    else:
        window = kwargs.get("sliding_window")
    # `sdpa` leaves soft caps and sinks out (older versions silently): so must its twin.
    is_sdpa = original == "sdpa"
    return AttentionOptions(
        scale=kwargs.get("scaling"),
        window=window,
        softcap=None if is_sdpa else kwargs.get("softcap"),
        sinks=None if is_sdpa else kwargs.get("s_aux"),
    )


def original_function(original: str, module: nn.Module) -> Callable[..., Any]:
    """Return the implementation that a twin wraps; "eager" is the modelling file's own."""
    eager = None
    for cls in type(module).__mro__:
        # A subclass in another file attends as the class that it inherits from.
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            break
    if original == "eager" and eager is not None:
        return eager
    return ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
