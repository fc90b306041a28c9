"""Recipes: a tiny random model of every causal language model type of transformers."""

from tests.architectures.recipes.build import CannotBuild, build, config_of, notes
from tests.architectures.recipes.types import decoder_only_types, model_types, multimodal_types

__all__ = [
    "CannotBuild",
    "build",
    "config_of",
    "decoder_only_types",
    "model_types",
    "multimodal_types",
    "notes",
]
