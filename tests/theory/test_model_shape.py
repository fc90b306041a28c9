"""Arithmetic of shapes: causal pairs, experts, caches."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.theory.model_shape import LayerShape, ModelShape, Weights, causal_pairs

few = st.integers(0, 40)


@given(few, few, st.none() | st.integers(1, 30))
def test_pairs_are_counted_one_by_one(length, rows, bound):
    counted = sum(min(length + j, bound or 10**9) for j in range(1, rows + 1))
    assert causal_pairs(length, rows, bound) == counted


@given(few, few, few, st.none() | st.integers(1, 30))
def test_two_blocks_attend_to_what_one_block_does(length, rows, more, bound):
    split = causal_pairs(length, rows, bound) + causal_pairs(length + rows, more, bound)
    assert causal_pairs(length, rows + more, bound) == split


def test_a_window_bounds_what_is_read():
    layer = LayerShape("window", stored=2, read=2, window=8)
    assert layer.keys_read(3, 2) == 5
    # Five rows of 8 keys each, every row one key further: 12 different keys.
    assert layer.keys_read(100, 5) == 12
    assert layer.pairs(100, 5) == 40


def test_experts_of_one_token_are_the_active_ones():
    weights = Weights(dense=0, head=0, expert=10, moe_layers=2, experts=8, active=2)
    assert weights.experts_read(1) == pytest.approx(2)
    assert weights.experts_read(0) == 0
    assert weights.streamed(1, 1) == pytest.approx(40)
    assert weights.flops(3, 3) == 2 * 3 * 40


@given(st.integers(1, 64), st.data(), st.floats(1, 500), st.floats(1, 500))
def test_more_tokens_touch_more_experts_but_never_more_than_there_are(experts, data, a, b):
    active = data.draw(st.integers(1, experts))
    weights = Weights(dense=0, head=0, expert=1, moe_layers=1, experts=experts, active=active)
    low, high = sorted((a, b))
    assert active - 1e-9 <= weights.experts_read(low) <= weights.experts_read(high) + 1e-9
    assert weights.experts_read(high) <= experts


def test_the_expected_experts_are_those_of_a_simulated_router():
    weights = Weights(dense=0, head=0, expert=1, moe_layers=1, experts=16, active=3)
    rng, trials = random.Random(1), 4000
    touched = [len({e for _ in range(5) for e in rng.sample(range(16), 3)}) for _ in range(trials)]
    assert weights.experts_read(5) == pytest.approx(sum(touched) / trials, abs=0.08)


def test_the_head_is_read_only_for_logits():
    weights = Weights(dense=100, head=7, idle=50)
    assert weights.streamed(4, 0) == 100
    assert weights.streamed(4, 4) == 107
    assert weights.flops(4, 1) == 2 * (4 * 100 + 7)
    assert (weights.total, weights.active_per_token) == (157, 107)


@pytest.fixture
def shape():
    layers = (
        LayerShape("full", kv_heads=2, stored=10, read=10),
        LayerShape("window", kv_heads=2, stored=10, read=10, window=64),
        LayerShape("full", kv_heads=2, stored=10, read=10, shared=True),
        LayerShape("none", state=500),
    )
    return ModelShape("toy", 8, 32, layers, Weights(dense=1000, head=256, idle=256))


def test_a_cache_grows_within_its_windows(shape):
    assert shape.cache_bytes(50) == 2 * 10 * 50 * 2 + 4 * 500
    assert shape.cache_bytes(1000) == (10 * 1000 + 10 * 64) * 2 + 4 * 500
    assert shape.kv_bytes_per_token == 20
    assert shape.full_layers == 2
    assert shape.has_state
    assert sum(count for _, count in shape.groups) == 4


def test_widths_can_be_changed(shape):
    narrow = shape.with_bytes(weight_bytes=0.5, kv_bytes=1.0)
    assert narrow.resident_bytes == shape.resident_bytes / 4
    assert narrow.kv_bytes_per_token == 10
    assert shape.with_bytes() == shape
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.vocab = 3
