"""The tiny stand-in for notebooks reads any text and generates."""

from __future__ import annotations

import torch

from pillarattn.evaluation.lossless import check_lossless
from pillarattn.evaluation.notebook_model import notebook_model


def test_the_tiny_model_reads_any_text_and_is_deterministic():
    model, tokenizer = notebook_model(tiny=True)
    text = "Problem 1. Solve x^2 = 4.\nSolution: café"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    again, _ = notebook_model(tiny=True)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_tiny_model_is_decoded_losslessly():
    from pillarattn import SelfSpeculativeGenerator

    model, tokenizer = notebook_model(tiny=True)
    inputs = tokenizer("Problem 1.", return_tensors="pt")
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    assistant = SelfSpeculativeGenerator(k=3, min_budget=8)
    assert check_lossless(model, inputs, assistant, max_new_tokens=8).lossless
