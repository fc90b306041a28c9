"""Whether a model can be decoded by sparse self-speculation, and if not, exactly why."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin

from pillarattn.errors import UnsupportedModelError
from pillarattn.patch.attention_function import PREFIX
from pillarattn.patch.compat import PreTrainedModel

SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
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
    if getattr(model, "_is_stateful", False):
        return f"{name} keeps recurrent state that cannot be rolled back"
    if not model._can_set_attn_implementation():
        return f"{name} computes attention outside transformers' AttentionInterface"
    implementation = attention_implementation(model)
    if implementation not in SUPPORTED_ATTENTION:
        return (
            f"{name} uses attn_implementation={implementation!r}; load it with one of "
            f"{', '.join(map(repr, SUPPORTED_ATTENTION))}"
        )
    config = model.config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(layer_types - set(SUPPORTED_LAYERS)):
        return f"{name} has {', '.join(odd)} layers, which this version does not roll back"
    if getattr(config, "reorder_and_upcast_attn", False):
        return f"{name} has reorder_and_upcast_attn=True; load it with False"
    return None


def has_window(config: Any) -> bool:
    """Whether some layer attends within a window, going by the config."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return "sliding_attention" in kinds
    return (
        getattr(text, "sliding_window", None) is not None
        and getattr(text, "use_sliding_window", True) is not False
    )


def rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding that a config names, nested ones included."""
    ropes = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    return {str(rope["rope_type"]) for rope in nested if "rope_type" in rope}


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

    Keys: model_type, verdict ("lossless" or "refused"), reason, layers, heads, kv_heads, head_dim,
    window, softcap, attention, sparse_layers.
    """
    reason = refusal(model)
    row: dict[str, Any] = {
        "model_type": getattr(getattr(model, "config", None), "model_type", None),
        "verdict": "lossless" if reason is None else "refused",
        "reason": reason,
    }
    if not isinstance(model, PreTrainedModel):
        return row
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and heads and getattr(config, "hidden_size", None):
        head_dim = config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = list(getattr(config, "layer_types", None) or [])
    if not kinds and layers:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    full = sum(kind == "full_attention" for kind in kinds)
    row.update(
        layers=layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        window=window,
        softcap=getattr(config, "attn_logit_softcapping", None),
        attention=attention_implementation(model),
        sparse_layers=full or len(kinds),
    )
    return row
