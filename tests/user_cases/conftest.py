"""The harness of every case: PLAIN, stock assisted decoding, and ours, on the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import pillarattn

GREEDY = {"do_sample": False}


@pytest.fixture(scope="session")
def plain(tiny_model: Callable[..., Any]) -> Any:
    """Return T-llama as nobody has touched it."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def patched(plain: Any) -> Any:
    """Return the same weights, patched."""
    return pillarattn.patch(copy.deepcopy(plain))


@pytest.fixture(scope="session")
def draft_model(plain: Any) -> Any:
    """Return a draft model for stock assisted decoding that is always right: seven tokens a block.

    A default threshold would cut its drafts short, and real faults would look absent.
    """
    model = copy.deepcopy(plain)
    model.generation_config.num_assistant_tokens = 7
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.fixture
def prompt() -> Callable[..., Tensor]:
    """Return `prompt(batch, length, seed=1)`: random token ids, never the padding token."""

    def build(batch: int, length: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, 97, (batch, length), generator=generator)

    return build


@pytest.fixture
def accepting() -> pillarattn.SelfSpeculativeGenerator:
    """Return a generator whose drafts read every key and are all accepted: blocks of eight."""
    return pillarattn.SelfSpeculativeGenerator(k=7, s=1.0)


@pytest.fixture
def rejecting() -> Callable[..., pillarattn.SelfSpeculativeGenerator]:
    """Return `rejecting(**options)`: drafts so sparse that some are rejected."""
    small = {"k": 4, "s": 0.7, "min_budget": 4, "recent": 2, "sink": 1}
    return lambda **options: pillarattn.SelfSpeculativeGenerator(**{**small, **options})


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one word a token, "w1" to "w96"."""
    words = {"abcdef": 0, **{f"w{i}": i for i in range(1, 97)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="abcdef"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="abcdef", unk_token="abcdef", padding_side="left"
    )


@pytest.fixture
def block_guard() -> Callable[[pillarattn.SelfSpeculativeGenerator], None]:
    """Return a check that some round committed three tokens or more: no vacuous test."""

    def check(pillar: pillarattn.SelfSpeculativeGenerator) -> None:
        assert max(max(row, default=0) for row in pillar.stats.accepted_per_round) >= 3

    return check


@pytest.fixture
def reject_guard() -> Callable[[pillarattn.SelfSpeculativeGenerator], None]:
    """Return a check that drafts were accepted and others rejected."""

    def check(pillar: pillarattn.SelfSpeculativeGenerator) -> None:
        assert 0 < pillar.stats.accepted < pillar.stats.drafted

    return check
