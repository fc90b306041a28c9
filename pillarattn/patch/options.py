"""Options of `generate` that sparse self-speculation cannot honour: each is refused by name."""

from __future__ import annotations

from typing import Any

from pillarattn.errors import UnsupportedOptionError

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


def check_call(kwargs: dict[str, Any]) -> None:
    """Raise for arguments of `generate` itself that compete with `assistant=`.

    Raises:
        UnsupportedOptionError: names the argument.
    """
    for name in ("assistant_model", "custom_generate"):
        if kwargs.get(name) is not None:
            raise UnsupportedOptionError(f"pass {name}= or assistant=, not both")
    for name in ("synced_gpus", "assistant_tokenizer"):
        if kwargs.get(name):
            raise UnsupportedOptionError(
                f"{name}={kwargs[name]!r} cannot be combined with assistant=; leave it out"
            )
