"""Shrinks a configuration class of transformers to a tiny instance."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from tests.architectures.recipes.fields import HEADS, SPECIAL_TOKENS, TINY, ZEROED_ENDINGS

# Enough for two full turns of a pattern of two kinds.
PATTERN_LAYERS = 4
# An override that keeps what the class itself would set.
KEEP = object()
# Set although the class defaults to None, which would mean "no groups" or "derive it".
_FILLED = {"num_key_value_heads", "num_kv_heads", "pad_token_id", "bos_token_id"}


def fields_of(cls: type[PreTrainedConfig]) -> set[str]:
    """The names of the fields that `cls` adds to the base configuration."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {field.name for field in dataclasses.fields(cls)} - base


def tiny_pattern(layer_types: list[str], length: int = PATTERN_LAYERS) -> list[str]:
    """Alternates every kind of `layer_types`, as they appear, over at least `length` layers."""
    kinds = list(dict.fromkeys(layer_types))
    return [kinds[index % len(kinds)] for index in range(max(length, len(kinds)))]


def shrink(
    cls: type[PreTrainedConfig], overrides: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """A tiny configuration of class `cls`.

    `overrides` wins over the table of `fields.py`; a dictionary given for a sub-configuration
    applies inside it; `KEEP` leaves a field to the class. Sub-configurations shrink as well.
    """
    overrides = dict(overrides or {})
    default = _default(cls)
    names = fields_of(cls)
    values = _tiny_values(names, default)
    if default is not None:
        values |= _pattern(names, default)
        values |= _parts(cls, default, overrides)
    values |= overrides
    return cls(**{name: value for name, value in values.items() if value is not KEEP})


def _default(cls: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return cls()
    except Exception:  # a class whose defaults contradict each other: the overrides must say more
        return None


def _read(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a value that differs by layer has no single answer, but it is set
        return KEEP


def _tiny_values(names: set[str], default: PreTrainedConfig | None) -> dict[str, Any]:
    wanted = {name: TINY[name] for name in names & TINY.keys()}
    wanted |= {name: SPECIAL_TOKENS[name] for name in names & SPECIAL_TOKENS.keys()}
    for name in names:
        if name.endswith(ZEROED_ENDINGS):
            # Strict classes accept no float where they declare an integer.
            wanted[name] = 0 if isinstance(_read(default, name), int) else 0.0
    if "kv_lora_rank" in names:
        # Latent attention expands one latent to every head; its "head" is the rotary part.
        wanted |= {name: HEADS for name in ("num_key_value_heads",) if name in names}
        wanted |= {name: TINY["qk_rope_head_dim"] for name in ("head_dim",) if name in names}
    if default is None:
        return wanted
    return {
        name: value
        for name, value in wanted.items()
        if name in _FILLED or value is None or _read(default, name) is not None
    }


def _pattern(names: set[str], default: PreTrainedConfig) -> dict[str, Any]:
    field = "layers_block_type" if "layers_block_type" in names else "layer_types"
    kinds = _read(default, field) if field in names else None
    if not kinds or kinds is KEEP or len(set(kinds)) == 1:
        return {}
    layers = tiny_pattern(kinds)
    depth = {"num_hidden_layers": len(layers)} if "num_hidden_layers" in names else {}
    return {field: layers, **depth}


def _parts(
    cls: type[PreTrainedConfig], default: PreTrainedConfig, overrides: dict[str, Any]
) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for name in getattr(cls, "sub_configs", {}):
        part = _read(default, name)
        if isinstance(part, PreTrainedConfig) and overrides.get(name) is not KEEP:
            given = overrides.pop(name, {})
            parts[name] = (
                given if isinstance(given, PreTrainedConfig) else shrink(type(part), given)
            )
    return parts
