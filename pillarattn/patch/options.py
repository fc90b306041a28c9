"""Options of `generate` that sparse self-speculation cannot honour: each is refused by name."""

from __future__ import annotations

from typing import Any

from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.support import has_window, rope_types

# Option: (values that change nothing, why others are refused).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search reorders rows at every token"),
    "num_beam_groups": ((None, 1), "beam search reorders rows at every token"),
    "diversity_penalty": ((None, 0.0), "it belongs to beam search"),
    "constraints": ((None,), "it belongs to beam search"),
    "force_words_ids": ((None,), "it belongs to beam search"),
    "penalty_alpha": ((None, 0.0), "contrastive search re-scores candidates"),
    "dola_layers": ((None,), "it changes the logits by other layers' logits"),
    "guidance_scale": ((None, 1, 1.0), "it runs a second, unconditional sequence"),
    "prompt_lookup_num_tokens": ((None,), "it is another drafter"),
    "assistant_early_exit": ((None,), "it is another drafter"),
    "use_mtp": ((None, False), "it is another drafter"),
    "use_cache": ((None, True), "drafts read the cache"),
    "cache_implementation": ((None, "dynamic", "dynamic_full"), "it keeps a cache of its own"),
    "output_attentions": ((None, False), "drafts do not compute all weights"),
    "output_hidden_states": ((None, False), "blocks of tokens have no per-token states"),
    "is_assistant": ((None, False), "the model cannot be assistant and target at once"),
}
_REFUSED_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model on a second sequence",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps state from call to call",
}


def check_generation_config(generation_config: Any) -> None:
    """Raise for a generation config that asks for what cannot be honoured.

    Raises:
        UnsupportedOptionError: names the option, its value, the reason and the way out.
    """
    for name, (harmless, reason) in _REFUSED.items():
        value = getattr(generation_config, name, None)
        if value not in harmless:
            raise UnsupportedOptionError(
                f"{name}={value!r} cannot be combined with assistant=: {reason}. "
                f"Leave {name} out, or call generate without assistant="
            )


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
                "Leave it out, or call generate without assistant="
            )


def check_prompt(
    model: Any, input_ids: Any, *, max_length: int, given: Any, kwargs: dict[str, Any]
) -> None:
    """Raise for a prompt or a length whose blocks would not equal single steps.

    Raises:
        UnsupportedOptionError: padding inside a windowed model's prompt, or a length at which the
            position embedding changes for tokens already cached.
    """
    mask = kwargs.get("attention_mask")
    is_holed = mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any())
    if is_holed and has_window(model.config):
        raise UnsupportedOptionError(
            "attention_mask has zeros after ones, and the model has windows, which count masked "
            "tokens; pad on the left only, or call generate without assistant="
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
            f"reach {last}; lower max_new_tokens, or call generate without assistant="
        )
    if "longrope" in kinds and first <= original < last:
        raise UnsupportedOptionError(
            f"rope_type='longrope' changes its factors at position {original}, and this "
            f"generation may cross it ({first} to {last}); lower max_new_tokens, or call "
            "generate without assistant="
        )


def _original_positions(config: Any) -> int:
    """Return the length at which dynamic and longrope embeddings change."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    named = [rope.get("original_max_position_embeddings") for rope in nested]
    named.append(getattr(config, "original_max_position_embeddings", None))
    known = [int(value) for value in named if value]
    return min(known, default=int(config.max_position_embeddings))


def check_call(kwargs: dict[str, Any], config: Any = None) -> None:
    """Raise for arguments of `generate` itself that compete with `assistant=`.

    Raises:
        UnsupportedOptionError: names the argument.
    """
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise UnsupportedOptionError(f"pass {name}= or assistant=, not both")
    # `generate` acts on this one before it calls anybody.
    for source in (
        kwargs.get("cache_implementation"),
        getattr(config, "cache_implementation", None),
    ):
        harmless, reason = _REFUSED["cache_implementation"]
        if source not in harmless:
            raise UnsupportedOptionError(
                f"cache_implementation={source!r} cannot be combined with assistant=: {reason}. "
                "Leave it out, or call generate without assistant="
            )
    for name in ("synced_gpus", "assistant_tokenizer", "token_healing"):
        if kwargs.get(name):
            raise UnsupportedOptionError(
                f"{name}={kwargs[name]!r} cannot be combined with assistant=; leave it out"
            )
