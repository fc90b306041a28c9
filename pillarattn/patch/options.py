"""Refusals, by name and before any compute, of what a call of `generate` cannot get from us."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import EncoderDecoderCache, GenerationConfig
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.generation_fields import GENERATE_ARGUMENTS, GENERATION_FIELDS
from pillarattn.patch.support import has_window, rope_types

_REFUSED_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model on a second sequence",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps state from call to call",
}
_PLAIN = "or call generate without assistant="


def check_call(kwargs: dict[str, Any], *, config: Any, model: Any) -> None:
    """Raise for an argument of `generate` that cannot be honoured, before anything is prepared.

    Args:
        kwargs: every argument by name, without `assistant`.
        config: the caller's `generation_config`, or None.
        model: the patched model; its own `generation_config` fills in what the call leaves out.

    Raises:
        UnsupportedOptionError: names the argument, its value, the reason and the way out.
    """
    for name, decision in GENERATE_ARGUMENTS.items():
        if decision.refuses(kwargs.get(name)):
            _refuse(name, kwargs[name], decision.reason, decision.harmless[-1])
    for name in GENERATION_FIELDS | _undecided():
        _check_field(name, effective(name, kwargs, config=config, model=model))
    check_model(model)


def effective(name: str, kwargs: dict[str, Any], *, config: Any, model: Any) -> Any:
    """Return the value of an option that `generate` will go by: the call, its config, the model."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(config, name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def check_generation_config(generation_config: Any) -> None:
    """Raise for a prepared generation config that asks for what cannot be honoured.

    Raises:
        UnsupportedOptionError: names the option, its value, the reason and the way out.
    """
    for name in GENERATION_FIELDS | _undecided():
        _check_field(name, getattr(generation_config, name, None))


def check_processors(processors: Any) -> None:
    """Raise for logits processors that are no functions of (input_ids, scores).

    Raises:
        UnsupportedOptionError: names the processor.
    """
    for processor in processors:
        reason = _REFUSED_PROCESSORS.get(type(processor).__name__)
        if reason is not None:
            raise UnsupportedOptionError(
                f"{type(processor).__name__} cannot be combined with assistant=: {reason}. "
                f"Leave it out, {_PLAIN}"
            )


def check_model(model: Any) -> None:
    """Raise for a state of the model in which rounds of drafts cannot run, or not exactly.

    Raises:
        UnsupportedOptionError: the model is in training mode, has no weights, is under a PEFT
            adapter that adds tokens, or is sharded so that all ranks must run as many passes.
    """
    if model.training:
        raise UnsupportedOptionError("the model is in training mode; call model.eval() first")
    if _ranks() > 1 and _is_sharded(model):
        raise UnsupportedOptionError(
            f"the model's weights are sharded over {_ranks()} ranks (FSDP or ZeRO-3), which must "
            "all run the same number of forward passes; rounds of drafts do not. Gather the "
            f"weights first, {_PLAIN}"
        )
    prepare = vars(model).get("prepare_inputs_for_generation")
    adapter = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedOptionError(
            f"{type(adapter).__name__} is prompt learning: it puts virtual tokens before what the "
            f"model is given, and would again before each draft. Merge or disable it, {_PLAIN}"
        )
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    is_offloaded = hasattr(embedding, "_hf_hook") or hasattr(model, "_hf_hook")
    if weight is not None and weight.is_meta and not is_offloaded:
        raise UnsupportedOptionError(
            f"{type(model).__name__} is on the meta device and has no weights; load them with "
            "from_pretrained, or move the model with to_empty and fill them"
        )


def check_prompt(
    model: Any, input_ids: Any, *, max_length: int, given: Any, kwargs: dict[str, Any]
) -> None:
    """Raise for a prompt, a cache or a length whose blocks would not equal single steps.

    Raises:
        UnsupportedOptionError: a cache for an encoder, padding inside a windowed model's prompt, or
            a length at which the position embedding changes for tokens already cached.
    """
    if isinstance(given, EncoderDecoderCache):
        raise UnsupportedOptionError(
            "an EncoderDecoderCache cannot be used with assistant=: the model has no encoder; pass "
            "a DynamicCache or a PillarCache, or none"
        )
    mask = kwargs.get("attention_mask")
    # The window first: to look at a mask is to wait for the device.
    if mask is not None and has_window(model.config) and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise UnsupportedOptionError(
            "attention_mask has zeros after ones, and the model has windows, which count masked "
            f"tokens; pad on the left only, {_PLAIN}"
        )
    kinds = rope_types(model.config)
    if not kinds & {"dynamic", "longrope"}:
        return
    config = model.config.get_text_config(decoder=True)
    positions = kwargs.get("position_ids")
    first = input_ids.shape[1] if positions is None else int(positions.max()) + 1
    last = first + max_length - input_ids.shape[1]
    original = _original_positions(config)
    if "dynamic" in kinds and last > original:
        raise UnsupportedOptionError(
            f"rope_type='dynamic' rescales positions beyond {original}, and this generation may "
            f"reach {last}; lower max_new_tokens, {_PLAIN}"
        )
    if "longrope" in kinds and first <= original < last:
        raise UnsupportedOptionError(
            f"rope_type='longrope' changes its factors at position {original}, and this "
            f"generation may cross it ({first} to {last}); lower max_new_tokens, {_PLAIN}"
        )


def _original_positions(config: Any) -> int:
    """Return the length at which dynamic and longrope embeddings change."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    named = [rope.get("original_max_position_embeddings") for rope in nested]
    named.append(getattr(config, "original_max_position_embeddings", None))
    known = [int(value) for value in named if value]
    return min(known, default=int(config.max_position_embeddings))


@cache
def _undecided() -> dict[str, Any]:
    """Return the fields, with their defaults, that this transformers has and the table lacks."""
    fields = vars(GenerationConfig())
    return {name: fields[name] for name in sorted(set(fields) - set(GENERATION_FIELDS))}


def _check_field(name: str, value: Any) -> None:
    decision = GENERATION_FIELDS.get(name)
    if decision is None:
        default = _undecided()[name]
        if value is not None and value is not default:
            _refuse(name, value, "this version of pillarattn does not know it", default)
    elif decision.refuses(value):
        _refuse(name, value, decision.reason, decision.harmless[-1])


def _refuse(name: str, value: Any, reason: str, instead: Any) -> None:
    raise UnsupportedOptionError(
        f"{name}={value!r} cannot be combined with assistant=: {reason}. "
        f"Leave {name} out, pass {name}={instead!r} if the model's own generation_config sets it, "
        f"{_PLAIN}"
    )


def _is_sharded(model: Any) -> bool:
    """Whether a forward pass gathers weights from other ranks."""
    # Some builds of torch have no distributed part; with several ranks it is there.
    from torch.distributed.fsdp import FSDPModule

    return (
        is_deepspeed_zero3_enabled()
        or is_fsdp_managed_module(model)
        or any(isinstance(module, FSDPModule) for module in model.modules())
    )


def _ranks() -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())
