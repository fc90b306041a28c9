"""Traffic: counted by hand for three models, properties for all, and a count of real products."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.modules.budgets.ratio import RatioBudget
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.model_shape import LayerShape, ModelShape, Weights
from pillarattn.theory.shape_reading import shape_from_config
from pillarattn.theory.traffic import (
    Traffic,
    draft_step,
    full_attention_traffic,
    gemm_traffic,
    plain_step,
    prefill,
    replay_pass,
    selected_keys,
    verify_pass,
)

# name: layers, hidden, MLP width, query heads, KV heads, head width, vocabulary.
BY_HAND = {
    "SmolLM2-135M": (30, 576, 1536, 9, 3, 64, 49152),
    "Qwen3-8B": (36, 4096, 12288, 32, 8, 128, 151936),
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8, 128, 128256),
}
lengths = st.integers(0, 3000)
shares = st.floats(0.01, 1)


@pytest.fixture(params=list(BY_HAND))
def by_hand(request):
    """A shape of the library, and (layers, Hq, Hkv, D, matrices of a pass) counted here."""
    depth, hidden, mlp, heads, kv_heads, width, vocab = BY_HAND[request.param]
    matrices = 0
    for _ in range(depth):
        matrices += hidden * heads * width  # q
        matrices += 2 * hidden * kv_heads * width  # k, v
        matrices += heads * width * hidden  # o
        matrices += 3 * hidden * mlp  # gate, up, down
    matrices += vocab * hidden
    shape = shape_from_config(KNOWN_MODELS[request.param])
    return shape, (depth, heads, kv_heads, width, matrices)


def test_a_plain_step(by_hand):
    shape, (depth, heads, kv_heads, width, matrices) = by_hand
    found = plain_step(shape, batch=5, length=999)
    cached = 2 * depth * kv_heads * width * 2  # keys and values, two bytes each
    assert found.weights == 2 * matrices
    assert found.kv_read == 5 * 1000 * cached
    assert found.kv_written == 5 * cached
    assert found.gemm_flops == 5 * 2 * matrices
    # A score and a weighted sum, 2 FLOPs a value, for 1000 keys and every query head.
    assert found.attention_flops == 5 * depth * heads * 1000 * 4 * width
    assert found.kv_gathered == found.scores == found.indices == found.state == 0


def test_a_draft_step(by_hand):
    shape, (depth, heads, kv_heads, width, matrices) = by_hand
    found = draft_step(shape, batch=5, length=4000, s=0.05, min_budget=128, step=3)
    keys = 200 + 3  # the budget, two earlier tokens of the round and its own
    cached = 2 * depth * kv_heads * width * 2
    assert found.weights == 2 * matrices
    assert found.kv_gathered == 5 * keys * cached
    assert found.kv_read == 0
    assert found.kv_written == 5 * cached
    assert found.indices == 5 * depth * kv_heads * 200 * 4
    assert found.attention_flops == 5 * depth * heads * keys * 4 * width


def test_a_verify_pass(by_hand):
    shape, (depth, heads, kv_heads, width, matrices) = by_hand
    found = verify_pass(shape, batch=5, length=4000, k=8)
    cached = 2 * depth * kv_heads * width * 2
    assert found.weights == 2 * matrices
    assert found.gemm_flops == 5 * 9 * 2 * matrices
    assert found.kv_read == 5 * 4009 * cached
    assert found.kv_written == 5 * 9 * cached
    pairs = sum(4000 + j for j in range(1, 10))
    assert found.attention_flops == 5 * depth * heads * pairs * 4 * width
    # One fp16 score a key and KV head: written once, read three times by the selection.
    assert found.scores == 5 * depth * kv_heads * 4009 * 2 * 4


@pytest.mark.parametrize(
    ("mode", "extra"),
    [
        ("pooled", 0),
        # Nine rows of four heads, fp16, written and read: 28 % of the cache.
        ("rows", 9 * 4 * 2 * 2),
        # All keys once more: half of the cache.
        ("reread", 128 * 2),
    ],
)
def test_other_ways_to_score(qwen3_8b, mode, extra):
    found = verify_pass(qwen3_8b, batch=1, length=991, k=8, scores=mode)
    assert found.scores == 36 * 8 * 1000 * (8 + extra)
    without = verify_pass(qwen3_8b, batch=1, length=991, k=8, scores="none")
    assert without.scores == 0
    assert without.bytes == found.bytes - found.scores


def test_a_prompt_pass(by_hand):
    shape, (depth, heads, kv_heads, width, matrices) = by_hand
    found = prefill(shape, batch=2, length=1000)
    head = shape.weights.head
    assert found.weights == 2 * matrices
    assert found.gemm_flops == 2 * (2 * 1000 * (matrices - head) + 2 * head)
    assert found.attention_flops == 2 * depth * heads * (1000 * 1001 // 2) * 4 * width
    assert found.kv_written == 2 * 1000 * 2 * depth * kv_heads * width * 2


def test_products_that_torch_really_makes(tiny_model):
    """FLOPs of a plain step and of a verify pass against torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_model("llama", attn_implementation="eager")
    shape = shape_from_config(model.config)
    with torch.no_grad():
        for rows in (1, 5):
            output = model(torch.randint(1, 97, (3, 20)), use_cache=True)
            name = "cache" if "cache" in output else "past_key_values"
            with FlopCounterMode(display=False) as counter:
                model(torch.randint(1, 97, (3, rows)), **{name: output[name]})
            found = gemm_traffic(shape, 3 * rows, 3 * rows)
            # Eager attention computes masked pairs too: every row sees all 20 + rows keys.
            full = 3 * rows * (20 + rows) * 2 * (4 * 4 * 16)
            rotary = counter.get_total_flops() - found.gemm_flops - full
            # The table of rotary angles is a small matrix product as well.
            assert 0 <= rotary <= 2 * 3 * rows * 16


def test_the_budget_is_that_of_the_library():
    for length in (1, 100, 1000, 3840, 3841, 4096, 8192, 16384, 122860):
        for s in (0.02, 0.05, 0.1, 0.333, 1.0):
            assert selected_keys(length, s, 192) == RatioBudget(s, 192)(length)


@pytest.mark.parametrize(
    ("length", "keys"),
    [(100, 100), (1000, 192), (3840, 192), (3841, 193), (4096, 205), (8192, 410), (32768, 1639)],
)
def test_the_papers_budgets(length, keys):
    assert selected_keys(length, 0.05, 192) == keys


@pytest.mark.parametrize("s", [0, -0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(s):
    with pytest.raises(ValueError, match="0 < s <= 1"):
        selected_keys(100, s)


def test_an_unknown_way_to_score_is_refused(qwen3_8b):
    with pytest.raises(ValueError, match="scores must be one of none, pooled, rows, reread"):
        verify_pass(qwen3_8b, 1, 10, k=2, scores="all")


def mixed_shape():
    layers = (
        LayerShape("full", 4, 2, stored=12, read=12, key_values=6, attend_flops=48),
        LayerShape("window", 4, 2, stored=12, read=12, attend_flops=48, window=50),
        LayerShape("indexed", 4, 1, stored=9, read=8, scanned=1, attend_flops=64, read_limit=20),
        LayerShape("none", state=70),
    )
    weights = Weights(dense=900, head=300, expert=40, moe_layers=2, experts=8, active=2)
    return ModelShape("mixed", 8, 32, layers, weights)


MIXED = mixed_shape()


@given(st.integers(1, 9), lengths)
def test_verifying_no_draft_without_scores_is_a_plain_step(batch, length):
    assert verify_pass(MIXED, batch, length, k=0, scores="none") == plain_step(MIXED, batch, length)


@given(lengths, shares, shares, st.integers(1, 12))
def test_a_larger_share_reads_more_and_never_more_than_everything(length, a, b, step):
    low, high = sorted((a, b))
    small = draft_step(MIXED, 1, length, s=low, min_budget=1, step=step)
    large = draft_step(MIXED, 1, length, s=high, min_budget=1, step=step)
    everything = draft_step(MIXED, 1, length, s=1.0, min_budget=1, step=step)
    plain = plain_step(MIXED, 1, length + step - 1)
    assert small.kv_bytes <= large.kv_bytes <= everything.kv_bytes == plain.kv_bytes
    assert everything.kv_written == plain.kv_written
    assert everything.flops == plain.flops


@given(lengths, lengths, st.integers(1, 8))
def test_longer_contexts_and_larger_batches_move_more(a, b, batch):
    low, high = sorted((a, b))
    for build in (plain_step, lambda *args: verify_pass(*args, k=4)):
        assert build(MIXED, batch, low).bytes <= build(MIXED, batch, high).bytes
        assert build(MIXED, batch, low).bytes < build(MIXED, batch + 1, low).bytes


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_prompt_in_two_chunks_does_the_same_work(first, second):
    chunks = full_attention_traffic(MIXED, 1, 0, first) + full_attention_traffic(
        MIXED, 1, first, second
    )
    whole = full_attention_traffic(MIXED, 1, 0, first + second)
    assert chunks.attention_flops == whole.attention_flops
    assert chunks.kv_written == whole.kv_written
    assert chunks.kv_read >= whole.kv_read


def test_window_layers_stop_growing_and_state_never_grows():
    only = ModelShape("w", 8, 32, (MIXED.layers[1], MIXED.layers[3]), Weights(10, 5))
    near, far = plain_step(only, 1, 60), plain_step(only, 1, 6000)
    assert near == far
    assert near.kv_read == 50 * 12 * 2
    assert near.state == 2 * 70 * 4
    # Nothing of it is sparse: a draft step does the same.
    assert draft_step(only, 1, 6000, s=0.05) == far


def test_expanding_latents_costs_a_draft_step_the_whole_cache():
    config = KNOWN_MODELS["DeepSeek-V3"]
    latent = shape_from_config(config, mla="latent")
    expanded = shape_from_config(config, mla="expanded")
    sparse, full = (draft_step(latent, 1, 10_000, s=s) for s in (0.05, 1.0))
    assert sparse.kv_bytes < 0.06 * full.kv_bytes
    sparse, full = (draft_step(expanded, 1, 10_000, s=s) for s in (0.05, 1.0))
    assert sparse.bytes > 0.4 * full.bytes
    assert latent.kv_bytes_per_token == expanded.kv_bytes_per_token == 61 * 576 * 2


def test_expanded_latents_by_hand():
    """One layer of 4 heads: 12 values cached a token, 4 x (10 + 6) expanded."""
    layer = LayerShape(
        *("full", 4, 4),
        **{"stored": 12, "read": 64, "scanned": 12, "expanded": 64},
        **{"attend_flops": 128, "expand_flops": 900},
    )
    shape = ModelShape("mla", 8, 32, (layer,), Weights(dense=10, head=5))
    verify = verify_pass(shape, batch=2, length=97, k=2, scores="none")
    assert verify.kv_read == 2 * 100 * (12 + 64) * 2
    assert verify.kv_written == 2 * (3 * 12 + 100 * 64) * 2
    assert verify.attention_flops == 2 * ((98 + 99 + 100) * 128 + 100 * 900)
    draft = draft_step(shape, batch=2, length=99, s=0.1, min_budget=1, step=1)
    assert (draft.kv_read, draft.kv_gathered) == (2 * 100 * 12 * 2, 2 * 11 * 64 * 2)
    assert draft.kv_written == 2 * (12 + 100 * 64) * 2
    assert draft.attention_flops == 2 * (11 * 128 + 100 * 900)


def test_an_indexer_by_hand():
    """Small keys of 3 values are scanned for every row, 20 of 100 keys are attended."""
    layer = LayerShape(
        *("indexed", 4, 1),
        **{"stored": 11, "read": 8, "scanned": 3, "scan_flops": 30, "attend_flops": 64},
        read_limit=20,
    )
    shape = ModelShape("dsa", 8, 32, (layer,), Weights(dense=10, head=5))
    found = verify_pass(shape, batch=1, length=98, k=1)
    # Two rows choose for themselves: at most 21 different keys if their choices overlap.
    assert found.kv_read == (21 * 8 + 100 * 3) * 2
    assert found.attention_flops == 2 * 20 * 64 + 2 * 100 * 30
    assert found.scores == 0


def test_replay_is_for_recurrent_state_only(qwen3_8b):
    assert replay_pass(qwen3_8b, 4, 100, rows=7.1) == Traffic()
    replay = replay_pass(MIXED, 4, 100, rows=5)
    assert replay.state == 4 * (2 + 2) * 70 * 4
    assert replay.gemm_flops == 2 * 4 * 5 * (900 + 2 * 2 * 40)


@given(st.floats(0, 5), st.floats(0, 5))
def test_traffic_adds_and_scales(a, b):
    one = Traffic(*(float(i) for i in range(1, 10)))
    split, whole = one * a + one * b, one * (a + b)
    assert dataclasses.astuple(split) == pytest.approx(dataclasses.astuple(whole))
    assert (one + one).bytes == 2 * one.bytes
    assert one.bytes == 1 + 2 + 3 + 4 + 5 + 6 + 7
    assert one.flops == 8 + 9
