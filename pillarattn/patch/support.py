"""Whether a model can be decoded by sparse self-speculation, and if not, exactly why."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin

from pillarattn.errors import UnsupportedModelError
from pillarattn.modules.cache import ContiguousLayer
from pillarattn.patch.attention_function import PREFIX
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import PreTrainedModel
from pillarattn.patch.layer_kinds import sparse_layer_count
from pillarattn.patch.tensor_parallel import kv_head_refusal

SUPPORTED_ATTENTION = ("sdpa", "eager")


def refusal(model: Any) -> str | None:
    """Return why `model` cannot be patched, or None if nothing speaks against it.

    This looks at the class and the config alone; `preflight` then runs the model.
    """
    if not isinstance(model, PreTrainedModel):
        return (
            f"{type(model).__name__} is no transformers PreTrainedModel; load it with "
            "AutoModelForCausalLM, or pass the model inside a wrapper"
        )
    name = type(model).__name__
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        return f"{name} cannot generate text; load it with AutoModelForCausalLM"
    if model.config.is_encoder_decoder:
        return f"{name} has an encoder; sparse drafts are for decoder-only models"
    implementation = attention_implementation(model)
    if implementation not in SUPPORTED_ATTENTION and model._can_set_attn_implementation():
        return (
            f"{name} uses attn_implementation={implementation!r}; load it with one of "
            f"{', '.join(map(repr, SUPPORTED_ATTENTION))}"
        )
    return kv_head_refusal(model)


def dense_reason(model: PreTrainedModel) -> str | None:
    """Return why sparse attention cannot act in a model that is not refused, or None if it may.

    Such a model is still decoded losslessly: it keeps its own attention and cache, and drafts come
    from prompt lookup.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(part._can_set_attn_implementation() for part in parts):
        return "attention is computed outside transformers' AttentionInterface"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn=True bypasses the AttentionInterface; load it with False"
    try:
        layers = PillarCache(config=model.config).layers
    except UnsupportedModelError as error:
        return str(error)
    if layers and not any(isinstance(layer, ContiguousLayer) for layer in layers):
        return "no layer has attention over keys"
    return None


def has_window(config: Any) -> bool:
    """Whether some layer attends within a window, going by the config."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return "sliding_attention" in kinds
    return (
        field(text, "sliding_window") is not None
        and getattr(text, "use_sliding_window", True) is not False
    )


def rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding that a config names, nested ones included."""
    ropes = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    return {str(rope["rope_type"]) for rope in nested if "rope_type" in rope}


def field(config: Any, name: str) -> Any:
    """Return a field of a config; None where there is none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def attention_implementation(model: PreTrainedModel) -> str:
    """Return the attention implementation that plain decoding uses."""
    return str(model.config._attn_implementation).removeprefix(PREFIX)


def check(model: Any) -> None:
    """Raise `UnsupportedModelError` with the reason if `refusal` finds one."""
    reason = refusal(model)
    if reason is not None:
        raise UnsupportedModelError(reason)


def describe(model: Any) -> dict[str, Any]:
    """Return one row about a model: its shape, and whether and how it can be decoded.

    Keys: model_type, verdict ("lossless", "lossless-dense-draft" or "refused"), reason, layers,
    heads, kv_heads, head_dim, window, softcap, attention, sparse_layers.
    """
    reason = refusal(model)
    verdict = "lossless" if reason is None else "refused"
    if reason is None:
        reason = dense_reason(model)
        verdict = "lossless" if reason is None else "lossless-dense-draft"
    row: dict[str, Any] = {
        "model_type": getattr(getattr(model, "config", None), "model_type", None),
        "verdict": verdict,
        "reason": reason,
    }
    if not isinstance(model, PreTrainedModel):
        return row
    config = model.config.get_text_config(decoder=True)
    heads = field(config, "num_attention_heads")
    layers = field(config, "num_hidden_layers")
    head_dim = field(config, "head_dim")
    hidden = field(config, "hidden_size")
    if head_dim is None and isinstance(heads, int) and heads and isinstance(hidden, int):
        head_dim = hidden // heads
    window = field(config, "sliding_window")
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    row.update(
        layers=layers,
        heads=heads,
        kv_heads=field(config, "num_key_value_heads") or heads,
        head_dim=head_dim,
        window=window,
        softcap=field(config, "attn_logit_softcapping"),
        attention=attention_implementation(model),
        sparse_layers=sparse_layer_count(model.config) if verdict == "lossless" else 0,
    )
    return row
