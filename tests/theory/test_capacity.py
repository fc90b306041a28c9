"""Memory: how many sequences fit, and what speculation adds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.theory.capacity import (
    draft_distribution_bytes,
    draft_hidden_bytes,
    max_sequences,
    speculation_bytes,
)
from pillarattn.theory.hardware import HARDWARE, custom_hardware
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.shape_reading import shape_from_config

SMALL = shape_from_config(KNOWN_MODELS["SmolLM2-135M"])


@pytest.mark.parametrize(("length", "batch"), [(4096, 202), (8192, 101), (16384, 50), (32768, 25)])
def test_published_batches_that_fill_an_h200(qwen3_8b, copy_limited_h200, length, batch):
    """829k tokens of cache beside the weights."""
    assert max_sequences(qwen3_8b, copy_limited_h200, length) == batch


def test_published_sizes_of_draft_state():
    """64 KB of hidden states against 5.8 MiB of fp32 distributions (10 rows of 151,936)."""
    assert draft_hidden_bytes(4096, 8) == 64 * 1024
    assert draft_distribution_bytes(151_936, 10) / 2**20 == pytest.approx(5.8, abs=0.01)


def test_what_speculation_adds_is_counted_by_hand(qwen3_8b):
    tail = 9 * 147_456
    scores, lists = 36 * 8 * 1009 * 2, 36 * 8 * 128 * 4
    assert speculation_bytes(qwen3_8b, 1000, k=8, s=0.05) == tail + scores + lists
    sampling = speculation_bytes(qwen3_8b, 1000, k=8, s=0.05, sampling=True)
    assert sampling == tail + scores + lists + 8 * 151_936 * 4
    assert speculation_bytes(qwen3_8b, 1000, k=0, s=0.05) == 0


@given(st.integers(1, 50_000), st.integers(1, 50_000), st.integers(0, 16))
def test_longer_sequences_and_speculation_never_fit_more(a, b, k):
    short, long = sorted((a, b))
    card = HARDWARE["L40S"]
    assert max_sequences(SMALL, card, long, k=k) <= max_sequences(SMALL, card, short, k=k)
    assert max_sequences(SMALL, card, short, k=k) <= max_sequences(SMALL, card, short)


@given(st.integers(1, 20_000), st.integers(0, 12))
def test_the_answer_fits_and_one_more_does_not(length, k):
    card = custom_hardware("card", bandwidth=1e12, flops=1e14, memory=8e9)
    fits = max_sequences(SMALL, card, length, k=k, reserve=0.0)
    each = SMALL.cache_bytes(length) + speculation_bytes(SMALL, length, k=k, s=0.05)
    assert SMALL.resident_bytes + fits * each <= card.memory
    assert SMALL.resident_bytes + (fits + 1) * each > card.memory


def test_a_model_that_does_not_fit_leaves_no_room(qwen3_8b):
    card = custom_hardware("card", bandwidth=1e12, flops=1e14, memory=8e9)
    assert max_sequences(qwen3_8b, card, 100) == 0
    with pytest.raises(ValueError, match="reserve"):
        max_sequences(qwen3_8b, card, 100, reserve=1.0)
