"""The attention function and its mask twin that Hugging Face models call while they speculate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from pillarattn.datatypes import Phase
from pillarattn.errors import UnsupportedModelError
from pillarattn.modules.attention import keep_queries
from pillarattn.modules.step import AttentionOptions
from pillarattn.patch.cache_adapter import ORIGIN
from pillarattn.patch.compat import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionInterface,
    AttentionMaskInterface,
)

PREFIX = "pillarattn_"
# Arguments that change what attention computes and that the kernels do not implement.
REFUSED_ARGUMENTS = ("position_bias", "indices", "block_indices", "sinks")


@dataclass
class MaskDescriptor:
    """Stands in for a mask: sparse attention needs only its window, plain attention builds it.

    Models hand it through to their attention function untouched.
    """

    build: Callable[..., Any]
    arguments: dict[str, Any]
    ndim: int = 4
    _mask: Any = None
    _is_built: bool = False

    @property
    def window(self) -> int | None:
        """Positions that a query sees, or None."""
        return self.arguments.get("local_size")

    def mask(self) -> Any:
        """Return what the original mask function makes of the arguments; built once a forward."""
        if not self._is_built:
            self._mask = self.build(**self.arguments)
            self._is_built = True
        return self._mask


def register(original: str) -> str:
    """Enter the twin functions that wrap the implementation `original`; return their name."""
    name = PREFIX + original
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(attention_forward, original))
        AttentionMaskInterface.register(name, partial(describe_mask, original))
    return name


def describe_mask(original: str, **arguments: Any) -> MaskDescriptor | None:
    """Mask twin: put off the building of `original`'s mask until somebody needs it."""
    if original not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    build = ALL_MASK_ATTENTION_FUNCTIONS[original]
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
    origin: tuple[Any, int] = getattr(key, ORIGIN, (None, 0))
    cache, index = origin
    step = getattr(cache, "step", None)
    if step is None or step.phase is Phase.PREFILL:
        if step is not None:
            options = attention_options(original, module, attention_mask, kwargs)
            cache.layers[index].window = options.window
            step.visited.append(index)
            keep_queries(query, step, index, options)
        mask = (
            attention_mask.mask() if isinstance(attention_mask, MaskDescriptor) else attention_mask
        )
        return original_function(original, module)(module, query, key, value, mask, **kwargs)
    if kwargs.get("dropout"):
        raise UnsupportedModelError(
            f"{type(module).__name__} applies attention dropout; call model.eval() first"
        )
    options = attention_options(original, module, attention_mask, kwargs)
    out = cache.attention(query, cache.layers[index], step, index, options)
    return out.transpose(1, 2).contiguous(), None


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
