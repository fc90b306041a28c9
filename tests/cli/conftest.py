"""A tiny random checkpoint with a tokenizer, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory, tiny_model) -> Path:
    """Return a folder that holds a tiny Llama and a word-level tokenizer: "w5" is token 5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = {"<pad>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, 97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder)
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory) -> Path:
    """Return a folder with a tiny random Llama that reads bytes, so that any text will do."""
    from pillarattn.evaluation.notebook_model import notebook_model

    folder = tmp_path_factory.mktemp("bytes")
    model, tokenizer = notebook_model(tiny=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
