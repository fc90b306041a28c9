"""Builds the tiny random model of a model type."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.architectures.recipes.fields import VOCAB
from tests.architectures.recipes.overrides import ASSIGNED, OVERRIDES
from tests.architectures.recipes.shrink import shrink
from tests.architectures.recipes.types import NO_STANDALONE_FORWARD, model_types
from tests.architectures.recipes.weights import draw_weights, focus_head


class CannotBuild(Exception):
    """A model type that has no stand-alone text model; the message says why."""


def notes(model_type: str) -> str | None:
    """Why `model_type` cannot be built, in one line; None if it can."""
    return NO_STANDALONE_FORWARD.get(model_type)


def config_of(model_type: str) -> PreTrainedConfig:
    """The tiny configuration of `model_type`."""
    config = shrink(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type))
    for name, value in ASSIGNED.get(model_type, {}).items():
        config.__dict__[name] = value  # past the validators
    return config


def build(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """A tiny random model in eval mode and float32; the same `seed` gives the same weights.

    Raises `CannotBuild` for a type that `notes` names.
    """
    reason = notes(model_type)
    if reason is not None:
        raise CannotBuild(f"{model_type}: {reason}")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _auto_class(model_type).from_config(config_of(model_type)).eval()
    draw_weights(model, model_type, generator)
    focus_head(model, VOCAB, generator)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def _auto_class(model_type: str) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    return AutoModelForCausalLM if model_type in model_types() else AutoModelForImageTextToText
