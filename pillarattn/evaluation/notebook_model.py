"""A model for notebooks: the built-in one where it is installed, else a tiny random one."""

from __future__ import annotations

from typing import Any

import torch

from pillarattn.evaluation.demo_model import BUILT_IN, has_demo_model, load_model


def notebook_model(*, tiny: bool | None = None, seed: int = 0) -> tuple[Any, Any]:
    """Return SmolLM2 with its tokenizer, or a tiny random Llama that reads bytes.

    Args:
        tiny: take the random model (True) or SmolLM2 (False); None for SmolLM2 where installed.
        seed: key of the random weights.

    Raises:
        ModuleNotFoundError: SmolLM2 was asked for and is not installed.
    """
    if not (not has_demo_model() if tiny is None else tiny):
        return load_model(BUILT_IN)
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Small weights would repeat one token for ever.
        initializer_range=0.35,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.name_or_path = "tiny random Llama"
    return model, tokenizer


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(["<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
