"""Every difference between supported versions of transformers, told by signature."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import transformers
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionLayer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

MINIMUM_VERSION = (5, 17)


class _NoSuchLayer:
    """Stands for a class that this version does not have: nothing is an instance of it."""


# Layers without a cache of their own; older versions have none in the list.
DummyLayer: type = getattr(cache_utils, "DummyLayer", _NoSuchLayer)

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "DummyLayer",
    "DynamicCache",
    "LinearAttentionLayer",
    "PreTrainedModel",
    "cache_keyword",
    "check_version",
    "decode_context",
    "decoder_output",
]


def check_version() -> None:
    """Raise `ImportError` with the supported range if transformers is too old."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < MINIMUM_VERSION:
        raise ImportError(
            f"pillarattn needs transformers >= 5.17, found {transformers.__version__}; "
            "pip install -U 'transformers>=5.17'"
        )


def cache_keyword() -> str:
    """Return what forwards and outputs call the cache: "cache" (newer) or "past_key_values"."""
    return (
        "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
    )


def decode_context(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Return the context that plain decoding runs in (newer versions switch MoE kernels there)."""
    optimise = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if optimise is None else optimise()


def decoder_output(cache: Any, **fields: Any) -> GenerateDecoderOnlyOutput:
    """Return generate's output class with the cache under the name that this version gives it."""
    return GenerateDecoderOnlyOutput(**fields, **{cache_keyword(): cache})
