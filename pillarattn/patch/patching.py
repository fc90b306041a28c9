"""`patch` and `unpatch`: in place, per instance, idempotent, and reversible to the byte."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from pillarattn.config import KERNEL_CHOICES
from pillarattn.decoding.kept_run import free_all_of
from pillarattn.patch.compat import PreTrainedModel, check_version
from pillarattn.patch.fused_layers import fusible_layers, linear_groups
from pillarattn.patch.generate import PatchedGenerate
from pillarattn.patch.preflight import preflight as run_preflight
from pillarattn.patch.record import RECORD, PatchRecord
from pillarattn.patch.support import check, dense_reason, describe
from pillarattn.patch.weight_memory import (
    as_one,
    can_move,
    lay_apart,
    lay_copies_apart,
    lay_together,
)
from pillarattn.patch.wrappers import inner_model

M = TypeVar("M", bound=PreTrainedModel)


def patch(
    model: M, *, kernels: str = "auto", preflight: bool = True, join_weights: bool = False
) -> M:
    """Prepare a causal LM for sparse self-speculation, in place; return it.

    The model gets a config of its own and a `generate` that takes `assistant=`; its weights, its
    type and what it computes without an assistant stay as they are. Twice only sets `kernels`, and
    joins weights if asked to.

    Args:
        model: any decoder-only `AutoModelForCausalLM`; inside a PEFT wrapper or a `torch.compile`d
            one, the model in there is prepared.
        kernels: "auto", "reference" (PyTorch) or "triton".
        preflight: run the model on a few random tokens first. Where blocks of tokens over selected
            keys do not give what single steps give, the model keeps its own attention and cache;
            where blocks do not give it either, it is refused. Turn it off only for known models.
        join_weights: move the weights of queries, keys and values to one stretch of memory, and
            those of gate and up, so that one product reads each. Parameters stay the objects that
            they are and keep their values; `unpatch` gives those that were moved memory of their
            own again. Ask for it before an engine is made of the model, and before anybody else
            knows where its weights lie: CUDA graphs of your own, tensors of an earlier
            `state_dict()`, another model or process that shares them. While they lie together,
            `save_pretrained` works and `safetensors.torch.save_model` does not, and plain
            pickle writes what they share once for each. It takes layers of the Llama or Qwen
            shape; other models stay as they are, with a warning. `copy.deepcopy` of the model,
            or weights in another dtype, are apart again, and those of a model that was stored
            and loaded after its own `unpatch`.

    Raises:
        UnsupportedModelError: the model cannot be decoded losslessly; says why and what to do.
        ValueError: `kernels` is unknown.
    """
    check_version()
    if kernels not in KERNEL_CHOICES:
        raise ValueError(
            f"kernels must be one of {', '.join(map(repr, KERNEL_CHOICES))}, got {kernels!r}"
        )
    inner = inner_model(model)
    if inner is not model:
        # A wrapper's `generate` calls that of the model inside.
        patch(inner, kernels=kernels, preflight=preflight, join_weights=join_weights)
        return model
    if is_patched(model):
        getattr(model, RECORD).kernels = kernels
        if join_weights:
            _join_weights(model, getattr(model, RECORD))
        return model
    check(model)
    record = PatchRecord(
        fields=[copy.deepcopy(vars(config)) for config in _configs(model)],
        configs=_own_configs(model),
        had_generate=model.__dict__.get("generate"),
        kernels=kernels,
        info=describe(model),
        dense_reason=dense_reason(model),
    )
    model.__dict__[RECORD] = record
    try:
        if preflight:
            run_preflight(model, record)
        if join_weights:
            _join_weights(model, record)
    except BaseException:
        _restore(model, record)
        # There may be no room: then some lie together, which does no harm.
        with suppress(RuntimeError):
            lay_apart(record.joined)
        raise
    if record.dense_reason is not None:
        record.info.update(
            verdict="lossless-dense-draft", reason=record.dense_reason, sparse_layers=0
        )
        warnings.warn(
            f"{type(model).__name__} is decoded losslessly, but sparse attention cannot act in it: "
            f"{record.dense_reason}. Drafts come from prompt lookup instead",
            stacklevel=2,
        )
    model.__dict__["generate"] = PatchedGenerate(model, record.had_generate)
    return model


def unpatch(model: M) -> M:
    """Undo `patch`: the model's configs, `generate` and attribute names are what they were.

    Weights that `patch` has moved get memory of their own.

    Generators free what they have kept of its generations: caches and recorded passes.
    """
    inner = inner_model(model)
    record = getattr(inner, RECORD, None)
    if record is not None:
        # What fails for lack of room leaves the model patched, so that it can be tried again.
        free_all_of(inner)
        lay_apart(record.joined)
        _lay_copy_apart(inner, record)
        _restore(inner, record)
    return model


def is_patched(model: Any) -> bool:
    """Whether `patch` has prepared this very object, or the model inside this wrapper."""
    return RECORD in getattr(inner_model(model), "__dict__", {})


def _join_weights(model: PreTrainedModel, record: PatchRecord) -> None:
    """Let weights lie together where they can, and warn where none does."""
    _lay_copy_apart(model, record)
    groups = linear_groups(fusible_layers(model))
    if any(map(can_move, groups)):
        # What was recorded reads the weights where they were.
        free_all_of(model)
    for group in groups:
        moved = lay_together(group)
        if moved is not None:
            record.joined.append(moved)
    if not any(as_one(group) for group in groups):
        warnings.warn(
            f"join_weights=True joins nothing in {type(model).__name__}: it takes layers of the "
            "Llama or Qwen shape with plain linear layers, whose weights have memory of their own",
            stacklevel=3,
        )
    if record.joined and model.device.type == "cuda":
        # What they lay in before is of use to others only so.
        torch.cuda.empty_cache()


def _lay_copy_apart(model: PreTrainedModel, record: PatchRecord) -> None:
    """Give weights of their own memory to a model that was stored while they lay together."""
    if record.is_joined_copy:
        # Whatever listens to a layer by now: all that are plain.
        lay_copies_apart(one for one in model.modules() if type(one) is nn.Linear)
        record.is_joined_copy = False


def _own_configs(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    """Give the model copies of its configs: models built from one object share it."""
    memo: dict[int, Any] = {}
    pairs = [(config, copy.deepcopy(config, memo)) for config in _configs(model)]
    _swap(model, {id(original): own for original, own in pairs})
    return pairs


def _configs(model: PreTrainedModel) -> list[Any]:
    """Return every config object that the model's modules hold."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, PreTrainedConfig):
                found.setdefault(id(value), value)
    return list(found.values())


def _restore(model: PreTrainedModel, record: PatchRecord) -> None:
    for (original, own), before in zip(record.configs, record.fields, strict=True):
        for name, value in vars(own).items():
            # A vocabulary that was resized while patched must not shrink in the config alone.
            if name.startswith("_") or isinstance(value, PreTrainedConfig):
                continue
            if name not in before or value != before[name]:
                setattr(original, name, value)
    _swap(model, {id(own): original for original, own in record.configs})
    model.__dict__.pop("generate", None)
    if record.had_generate is not None:
        model.__dict__["generate"] = record.had_generate
    model.__dict__.pop(RECORD, None)


def _swap(model: PreTrainedModel, replacements: dict[int, Any]) -> None:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in replacements:
                module.__dict__[name] = replacements[id(value)]
