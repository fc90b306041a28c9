"""The decision on every option of `generate`: honoured, refused with a reason, or without effect.

Each field of `GenerationConfig` and each argument of `generate` itself has one entry. A field that
a newer transformers adds has none, so that setting it is refused until somebody decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What becomes of an option when `assistant=` is given."""

    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


@dataclass(frozen=True)
class Decision:
    """One option's entry.

    Attributes:
        verdict: what becomes of it.
        reason: how it is honoured, why it is refused, or why it changes nothing.
        harmless: of a refused option, the values that ask for nothing; the last one is what to pass
            instead.
    """

    verdict: Verdict
    reason: str
    harmless: tuple[Any, ...] = (None,)

    def refuses(self, value: Any) -> bool:
        """Whether this value of the option is refused."""
        return self.verdict is Verdict.REFUSED and not any(
            # Values may be tensors or arrays, which have no single truth.
            value is allowed or (isinstance(value, (bool, int, float, str)) and value == allowed)
            for allowed in self.harmless
        )


def _honoured(reason: str) -> Decision:
    return Decision(Verdict.HONOURED, reason)


def _refused(reason: str, *harmless: Any) -> Decision:
    return Decision(Verdict.REFUSED, reason, (None, *harmless))


def _no_effect(reason: str) -> Decision:
    return Decision(Verdict.NO_EFFECT, reason)


_PROCESSOR = _honoured("its logits processor is called at every position of a block")
_WARPER = _honoured("its warper shapes the distribution of drafts and of the target alike")
_BEAMS = "beam search reorders rows at every token"
_BEAMS_ONLY = _no_effect("plain decoding reads it in beam search only")
_DRAFT_MODELS = _no_effect("only a draft model in assistant_model= reads it; k sets our drafts")
_COMPILE = _no_effect("plain decoding compiles for a static cache only")
_METADATA = _no_effect("it describes where the config came from")

GENERATION_FIELDS: dict[str, Decision] = {
    # Length and stopping: asked at every token of a block, where plain decoding would ask.
    "max_length": _honoured("drafts never run past it"),
    "max_new_tokens": _honoured("drafts never run past it"),
    "min_length": _PROCESSOR,
    "min_new_tokens": _PROCESSOR,
    "max_time": _honoured("asked at every token; a round that has begun is finished first"),
    "stop_strings": _honoured("asked at every token"),
    "eos_token_id": _honoured("nothing is emitted after it, wherever in a block it stands"),
    # How tokens are chosen.
    "do_sample": _honoured("greedy by argmax, sampling by rejection or by seeded noise"),
    "num_return_sequences": _honoured("samples are rows of one batch"),
    "temperature": _WARPER,
    "top_k": _WARPER,
    "top_p": _WARPER,
    "top_h": _WARPER,
    "min_p": _WARPER,
    "typical_p": _WARPER,
    "epsilon_cutoff": _WARPER,
    "eta_cutoff": _WARPER,
    "renormalize_logits": _WARPER,
    "remove_invalid_values": _PROCESSOR,
    "repetition_penalty": _PROCESSOR,
    "encoder_repetition_penalty": _PROCESSOR,
    "no_repeat_ngram_size": _PROCESSOR,
    "encoder_no_repeat_ngram_size": _PROCESSOR,
    "bad_words_ids": _PROCESSOR,
    "sequence_bias": _PROCESSOR,
    "suppress_tokens": _PROCESSOR,
    "begin_suppress_tokens": _PROCESSOR,
    "forced_bos_token_id": _PROCESSOR,
    "forced_eos_token_id": _PROCESSOR,
    "exponential_decay_length_penalty": _PROCESSOR,
    "watermarking_config": _honoured(
        "its processor is called at every position; SynthID keeps state and is refused"
    ),
    # What goes in and what comes out.
    "bos_token_id": _honoured("generate makes the prompt of it when none is given"),
    "pad_token_id": _honoured("finished rows are filled with it"),
    "prefill_chunk_size": _honoured("the prompt goes through generate's own prefill"),
    "return_dict_in_generate": _honoured("the output class is generate's own"),
    "output_scores": _honoured("kept of every token that is emitted"),
    "output_logits": _honoured("kept of every token that is emitted"),
    # Other ways of decoding.
    "num_beams": _refused(_BEAMS, 1),
    "num_beam_groups": _refused(_BEAMS, 1),
    "diversity_penalty": _refused("it belongs to beam search", 0.0),
    "constraints": _refused("it belongs to beam search"),
    "force_words_ids": _refused("it belongs to beam search"),
    "penalty_alpha": _refused("contrastive search re-scores candidates", 0.0),
    "dola_layers": _refused("it changes the logits by other layers' logits"),
    "guidance_scale": _refused("it runs a second, unconditional sequence", 1.0),
    "prompt_lookup_num_tokens": _refused("it is another drafter"),
    "assistant_early_exit": _refused("it is another drafter"),
    "use_mtp": _refused("it is another drafter", False),
    "speculation_type": _refused("it is another drafter"),
    "assistant_ensemble_weight": _refused("it accepts drafts that the model would not choose"),
    "is_assistant": _refused("the model cannot be assistant and target at once", False),
    # What rounds of drafts, or a decoding method of one's own, cannot give.
    "token_healing": _refused(
        "generate keeps the tokenizer from us; heal the prompt yourself, with "
        "input_ids = model.heal_tokens(input_ids, tokenizer)",
        False,
    ),
    "use_cache": _refused("drafts read the cache", True),
    # "hybrid" in old checkpoints means the default: generate itself drops it. A static cache has no
    # room for drafts: it is filled when the run is over.
    "cache_implementation": _refused(
        "drafts need a cache that rolls back", "hybrid", "dynamic_full", "static", "dynamic"
    ),
    "output_attentions": _refused("drafts do not compute all weights", False),
    "output_hidden_states": _refused("blocks of tokens have no per-token states", False),
    # What plain decoding of a decoder-only model does not read either.
    "early_stopping": _BEAMS_ONLY,
    "length_penalty": _BEAMS_ONLY,
    "low_memory": _no_effect("plain decoding reads it in contrastive search only"),
    "num_assistant_tokens": _DRAFT_MODELS,
    "num_assistant_tokens_schedule": _DRAFT_MODELS,
    "assistant_confidence_threshold": _DRAFT_MODELS,
    "assistant_lookbehind": _DRAFT_MODELS,
    "target_lookbehind": _DRAFT_MODELS,
    "max_matching_ngram_size": _no_effect("prompt lookup reads it, which is refused"),
    "decoder_start_token_id": _no_effect("encoder-decoder models read it"),
    "cache_config": _no_effect("quantised caches read it, which are refused"),
    "max_cache_len": _no_effect("it sizes the static cache that generate makes"),
    "compile_config": _COMPILE,
    "disable_compile": _COMPILE,
    "continuous_batching_config": _no_effect("generate_batch reads it"),
    "transformers_version": _METADATA,
    "_from_model_config": _METADATA,
    "_commit_hash": _METADATA,
}

_GUIDANCE_ONLY = _no_effect("guidance_scale reads it, which is refused")

# Arguments that `generate` takes beside the fields of its config.
GENERATE_ARGUMENTS: dict[str, Decision] = {
    "inputs": _honoured("prepared by generate itself"),
    "generation_config": _honoured("each of its fields is decided above"),
    "logits_processor": _honoured("called at every position of a block, as plain decoding would"),
    "stopping_criteria": _honoured("asked at every token, as plain decoding would"),
    "prefix_allowed_tokens_fn": _honoured("asked at every position of a block"),
    "streamer": _honoured("gets every token once, in order, as soon as it is final"),
    "tokenizer": _honoured("stop_strings use it"),
    "synced_gpus": _refused("ranks would run different numbers of forward passes", False),
    "assistant_model": _refused("it is another drafter; pass one of the two"),
    "assistant_tokenizer": _refused("it belongs to assistant_model"),
    "custom_generate": _refused("it replaces the whole decoding loop; pass one of the two"),
    "negative_prompt_ids": _GUIDANCE_ONLY,
    "negative_prompt_attention_mask": _GUIDANCE_ONLY,
    "trust_remote_code": _no_effect("custom_generate reads it, which is refused"),
}


def markdown_table(decisions: dict[str, Decision]) -> str:
    """Return the decisions as a Markdown table, by verdict and name; the documentation's own."""
    order = list(Verdict)
    names = sorted(decisions, key=lambda name: (order.index(decisions[name].verdict), name))
    lines = ["| option | with `assistant=` | how, or why |", "|---|---|---|"]
    for name in names:
        decision = decisions[name]
        words = decision.verdict.value
        if decision.verdict is Verdict.REFUSED:
            allowed = ", ".join(f"`{value!r}`" for value in decision.harmless)
            words = f"refused, except {allowed}"
        lines.append(f"| `{name}` | {words} | {decision.reason} |")
    return "\n".join(lines)
