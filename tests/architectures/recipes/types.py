"""Which model types there are, which of them decode text alone, and which cannot be built."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.recipes.overrides import MULTIMODAL

# The causal head of a bidirectional encoder family.
ENCODER_FAMILY = frozenset(
    """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert
    roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod
    """.split()  # noqa: SIM905
)
# The decoder of an encoder-decoder family, without its encoder.
ENCODER_DECODER = frozenset(
    """
    bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
    trocr whisper
    """.split()  # noqa: SIM905
)
# A multimodal model, or a text class reached through a multimodal configuration. Where the text
# tower has a type of its own, such as gemma3_text, that one counts.
MULTIMODAL_WRAPPER = frozenset(
    """
    dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama moshi
    moss_transcribe_diarize phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp
    """.split()  # noqa: SIM905
)
# No attention over earlier tokens at all, or one over permutations and hash buckets.
NO_CAUSAL_ATTENTION = frozenset(
    {"falcon_mamba", "mamba", "mamba2", "reformer", "rwkv", "xlnet", "xlstm"}
)
NO_STANDALONE_FORWARD = {
    "gemma4_assistant": "a drafter head: it needs another model's hidden states and keys",
    "gemma4_unified_assistant": "a drafter head: it needs another model's hidden states and keys",
    "musicgen": "decodes four audio codebooks at once, not text",
    "musicgen_melody": "decodes four audio codebooks at once, not text",
}


def model_types() -> list[str]:
    """Every model type that the installed transformers maps to a causal language model, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def decoder_only_types() -> list[str]:
    """The types of `model_types` that are text decoders with causal attention: 139 in 5.24.

    Left out are the causal heads of encoder families, decoders of encoder-decoder families,
    multimodal wrappers, families without causal attention, and types without a stand-alone text
    forward.
    """
    left_out = (
        ENCODER_FAMILY
        | ENCODER_DECODER
        | MULTIMODAL_WRAPPER
        | NO_CAUSAL_ATTENTION
        | NO_STANDALONE_FORWARD.keys()
    )
    return [name for name in model_types() if name not in left_out]


def multimodal_types() -> list[str]:
    """Twelve multimodal families, reached through `AutoModelForImageTextToText`, as text towers."""
    return sorted(MULTIMODAL)
