"""Settings of an engine are checked when they are made."""

from __future__ import annotations

import pytest
import torch

from pillarattn.config import PillarConfig
from pillarattn.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("kv_tokens", 0, ">= 1"),
        ("kv_tokens", 8, "a block of 16"),
        ("host_tokens", -1, ">= 0"),
        ("block_size", 8, "1, 16, 64"),
        ("max_batch", 0, ">= 1"),
        ("prefill_chunk", 1.5, "integer"),
        ("phases", "random", "'lockstep', 'unified'"),
        ("admission", "eager", "'optimistic', 'reserve'"),
        ("eviction", "oldest", "'fifo', 'heat'"),
        ("offload_chunk", 0, ">= 1"),
        ("max_length", 0, ">= 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=field) as caught:
        EngineConfig(**{field: value})
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"drafter": ("ngram", "sparse")}, {"acceptance": "greedy"}, {"parity": "reference"},
     {"k": "auto"}],
)  # fmt: skip
def test_drafts_that_the_engine_does_not_make_are_refused(changes):
    with pytest.raises(ValueError, match=f"pillar.{next(iter(changes))}"):
        EngineConfig(pillar=PillarConfig(**changes))


def test_prompt_lookup_is_taken_in_every_form():
    for drafter in ("ngram", {"name": "ngram", "max_ngram": 7}, ["ngram"]):
        EngineConfig(pillar=PillarConfig(drafter=drafter))


def test_tokens_become_blocks():
    scheduler = EngineConfig(kv_tokens=1000, host_tokens=100, block_size=64).scheduler()
    assert (scheduler.num_blocks, scheduler.host_blocks) == (15, 1)


@pytest.mark.parametrize(("device", "wanted"), [(None, 512), ("cpu", 512), ("cuda", 2048)])
def test_a_gpu_takes_longer_chunks_of_prompts(device, wanted):
    device = device and torch.device(device)
    assert EngineConfig().scheduler(device).prefill_chunk == wanted
    assert EngineConfig(prefill_chunk=99).scheduler(device).prefill_chunk == 99
