"""Tiny random checkpoints with tokenizers, on disk; and records as a runner makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """Return `build(strategy="pillar", accepted=4.0, **config)`: a record as a runner makes it."""
    return _build_record


def _build_record(strategy: str = "pillar", accepted: float = 4.0, **config: Any) -> dict[str, Any]:
    from pillarattn.evaluation.eval_config import EvalConfig

    made = EvalConfig(strategy=strategy, **config)
    k = made.k if isinstance(made.k, int) else 8
    metrics = {
        "rounds": 10, "mean_accepted": accepted, "acceptance_rate": accepted / k,
        "acceptance_length": accepted + 1,
        "acceptance_by_position": [max(0.0, accepted / k - 0.02 * j) for j in range(k)],
        "by_length": [
            {"from": 512, "to": 1024, "rounds": 4, "mean_accepted": accepted + 0.5},
            {"from": 1024, "to": 2048, "rounds": 6, "mean_accepted": accepted - 0.5},
        ],
        "keys_read_per_draft_step": 50.0, "keys_full_per_draft_step": 1000.0,
        "kv_bytes_share": 0.25, "tokens_per_second": 30.0, "plain_tokens_per_second": 20.0,
        "decode_speedup": 1.5, "total_speedup": 1.4, "predicted_speedup": None,
        "recall": 0.9, "recall_by_head": [[0.9, 0.8], [1.0, 0.9]], "recall_layers": [0, 1],
        "kept_text": {
            "strategy": strategy, "texts": ["a", " word"], "share": [0.2, 1.0], "first": 0,
            "prompt_tokens": 1, "choices": 3,
        },
        "examples": 4, "judged": 4, "correct": 1, "accuracy": 0.25,
        "mean_prompt_tokens": 100.0, "mean_new_tokens": 50.0, "std_new_tokens": 5.0,
    }  # fmt: skip
    return {
        "schema": 1,
        "kind": "evaluation",
        "hash": made.hash,
        "label": made.label,
        "status": "ok",
        "config": made.to_dict(),
        "metrics": metrics,
        "lossless": {"lossless": True, "verdict": "lossless (greedy): 200 new tokens in 4 rows"},
        "environment": {
            "device_name": "A CPU",
            "threads": 2,
            "versions": {"torch": "2.13", "transformers": "5.24"},
        },
        "commit": "0123456789abcdef",
        "started_at": "2026-01-01T00:00:00+00:00",
    }
