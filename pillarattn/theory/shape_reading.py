"""Build a `ModelShape` from a Hugging Face config, a dict, or a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pillarattn.theory.config_fields import ConfigFields
from pillarattn.theory.layer_shapes import layer_shapes
from pillarattn.theory.model_shape import ModelShape
from pillarattn.theory.weight_counts import bytes_of_model, weights_of_config, weights_of_model

# Families whose blocks differ so much from the common one that rules miss by more than 5 %.
_OFF_BY_RULE = (
    *("electra", "gemma3n_text", "gemma4_text", "jetmoe", "longcat_flash", "recurrent_gemma"),
    *("rembert", "zamba", "zamba2"),
)
# Families that run some modules several times in one pass.
_REENTRANT = ("dory", "hrm_text", "inkling2_loop_text", "zamba", "zamba2")
_APPROXIMATE = "weights of {} are only approximate by rule; shape_from_model counts them"


def shape_from_config(config: Any, *, name: str = "", mla: str = "latent") -> ModelShape:
    """Read the shape of a decoder out of its config; weights are counted by rule.

    Args:
        config: a Hugging Face config object, or the dict of a `config.json`. Of a multimodal config
            only the language model is read.
        name: how to call it; by default its model type.
        mla: how latent attention reads its cache, "latent" or "expanded" (see `layer_shapes`).

    Raises:
        ValueError: a needed field is missing; the message names it.
    """
    fields = ConfigFields(config)
    layers, notes = layer_shapes(fields, mla)
    if fields.model_type in _OFF_BY_RULE:
        notes.append(_APPROXIMATE.format(fields.model_type))
    if fields.model_type in _REENTRANT:
        notes.append("modules that run several times in a pass are counted once")
    return ModelShape(
        name=name or fields.model_type or "model",
        hidden=fields.need("hidden"),
        vocab=fields.need("vocab"),
        layers=tuple(layers),
        weights=weights_of_config(fields, layers),
        weight_bytes=fields.weight_bytes,
        kv_bytes=fields.dtype_bytes,
        notes=tuple(notes),
    )


def shape_from_model(model: Any, *, name: str = "", mla: str = "latent") -> ModelShape:
    """Read a shape from a model: layers from its config, weights by counting its parameters.

    Works on the meta device, where a model of any size takes no memory. The bytes of a parameter
    are those of the model; those of a cached value follow the config's dtype.

    Raises:
        ValueError: its config lacks a needed field.
    """
    shape = shape_from_config(model.config, name=name, mla=mla)
    return replace(
        shape,
        notes=tuple(note for note in shape.notes if "by rule" not in note),
        weights=weights_of_model(model, shape.weights),
        weight_bytes=bytes_of_model(model),
    )
