"""The planner: published ceilings, limits, break-even points, and agreement with the formula."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pillarattn.theory.acceptance import AcceptanceTable, constant_acceptance, positional_acceptance
from pillarattn.theory.hardware import HARDWARE, custom_hardware
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.planner import (
    SCHEDULES,
    Workload,
    break_even_batch,
    break_even_length,
    expect,
    plain_seconds,
    plan,
)
from pillarattn.theory.roofline import KERNELS, pass_seconds, roofline_seconds
from pillarattn.theory.shape_reading import shape_from_config
from pillarattn.theory.speedup import attention_bound, seconds_per_token
from pillarattn.theory.traffic import draft_step, gemm_traffic, plain_step, verify_pass

QWEN = shape_from_config(KNOWN_MODELS["Qwen3-8B"])
SMALL = shape_from_config(KNOWN_MODELS["SmolLM2-135M"])
PAPER = {"k": 8, "s": 0.05, "accepted": 0.77 * 8}
# The published tables leave out index lists (0.8 % of a gather) and the tokens that drafts read
# beyond their budget (4.5 of 819 at 16k): less than this share of a round. They print 2 decimals.
LEFT_OUT = 0.006


def ceiling(hardware, batch, length, schedule="unified"):
    """The setting of the published ceiling tables: no floor of the budget, scores for nothing."""
    return Workload(QWEN, hardware, batch, length, schedule=schedule, min_budget=1, scores="none")


@pytest.mark.parametrize(
    ("length", "speedups"),
    [
        (4096, (0.82, 0.90, 1.19, 1.51, 2.02, 2.30, 2.19)),
        (16384, (0.90, 1.19, 2.02, 2.71, 3.45, 3.79, 3.74)),
        (65536, (1.19, 2.02, 3.45, 4.08, 4.53, 4.69, 4.67)),
    ],
)
def test_published_ceilings_of_one_h200(copy_limited_h200, length, speedups):
    found = [
        expect(ceiling(copy_limited_h200, batch, length), **PAPER).speedup
        for batch in (1, 4, 16, 32, 64, 128, 256)
    ]
    assert found == pytest.approx(speedups, rel=LEFT_OUT, abs=0.005)


def test_published_ceilings_of_one_h100():
    h100 = custom_hardware("H100", bandwidth=3.0e12, flops=790e12, memory=80e9)
    found = [expect(ceiling(h100, b, 16384), **PAPER).speedup for b in (128, 256)]
    assert found == pytest.approx([4.08, 4.07], rel=LEFT_OUT, abs=0.005)


def test_lockstep_loses_to_the_unified_schedule_at_large_batches(copy_limited_h200):
    found = {
        (schedule, batch, length): expect(
            ceiling(copy_limited_h200, batch, length, schedule), **PAPER
        ).speedup
        for schedule in ("lockstep", "unified")
        for batch, length in ((32, 16384), (128, 4096))
    }
    assert found["lockstep", 32, 16384] == pytest.approx(2.62, rel=LEFT_OUT)
    assert found["lockstep", 128, 4096] == pytest.approx(2.04, rel=LEFT_OUT)
    assert found["unified", 128, 4096] == pytest.approx(2.30, rel=LEFT_OUT)


@pytest.mark.parametrize(("alpha", "best"), [(0.94, [2, 7, 9, 9, 7]), (0.97, [3, 10, 14, 14, 11])])
def test_published_best_k(copy_limited_h200, alpha, best):
    at = ((1, 32768), (16, 16384), (32, 16384), (64, 8192), (128, 4096))
    found = [
        plan(ceiling(copy_limited_h200, b, n), constant_acceptance(alpha), ss=(0.05,)).best.k
        for b, n in at
    ]
    assert found == best


def test_published_gains_at_batch_one(copy_limited_h200):
    found = [
        plan(ceiling(copy_limited_h200, 1, n), constant_acceptance(0.94), ss=(0.05,)).best.speedup
        for n in (16384, 32768, 65536, 131072)
    ]
    assert found == pytest.approx([1.04, 1.11, 1.26, 1.55], abs=0.006)


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.floats(0, 1),
    st.sampled_from([0.05, 0.125, 0.5, 1.0]),
    st.integers(1, 300),
    st.integers(20, 200),
)
def test_the_unified_schedule_is_the_corrected_formula(k, rate, s, batch, blocks):
    """With what the formula leaves out made small, both give one time per token."""
    hardware, length = HARDWARE["H200"], blocks * 1000
    work = ceiling(hardware, batch, length)
    one_token = plain_step(QWEN, 1, length - 1)
    by_formula = seconds_per_token(
        *(k, rate, s),
        batch=batch,
        cached_tokens=batch * length,
        gemm_seconds=lambda rows: roofline_seconds(gemm_traffic(QWEN, rows, rows), hardware).total,
        attention_seconds=lambda tokens: (
            tokens / length * (one_token.kv_read + one_token.kv_written) / hardware.bandwidth
        ),
    )
    found = expect(work, k=k, s=s, accepted=rate * k)
    # Index lists and the round's own tokens: at most a few tokens in a thousand.
    assert found.round_seconds / found.acceptance_length == pytest.approx(by_formula, rel=0.015)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batch", [1, 7, 128])
def test_no_drafts_is_plain_decoding(schedule, batch):
    work = Workload(QWEN, HARDWARE["H200"], batch, 5000, KERNELS, schedule)
    found = expect(work, k=0, s=0.05, accepted=0.0)
    assert found.speedup == 1
    assert found.round_seconds == found.plain_seconds == plain_seconds(work).total
    assert found.kv_bytes_per_token == found.plain_kv_bytes_per_token
    assert (found.acceptance_length, found.acceptance_rate) == (1, 0)


@settings(max_examples=60)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 12),
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.integers(1, 200),
    st.integers(300, 60_000),
)
def test_no_setting_beats_the_attention_bound(schedule, k, rate, s, batch, length):
    work = Workload(SMALL, HARDWARE["H200"], batch, length, KERNELS, schedule, min_budget=1)
    found = expect(work, k=k, s=s, accepted=rate * k)
    assert found.speedup <= attention_bound(k, rate, s) * (1 + 1e-9)
    # More acceptance and a smaller share are never slower.
    assert expect(work, k=k, s=s, accepted=k).speedup >= found.speedup
    assert expect(work, k=k, s=min(1.0, 2 * s), accepted=rate * k).speedup <= found.speedup + 1e-9


def test_reading_everything_cannot_pay():
    """Where weights cost nothing and gathers are free of loss, s = 1 and no rejection gain 1."""
    work = Workload(SMALL, HARDWARE["H200"], 400, 10**6, scores="none", min_budget=1)
    work = dataclasses.replace(
        work, shape=dataclasses.replace(SMALL, weight_bytes=1e-9), schedule="unified"
    )
    found = expect(work, k=8, s=1.0, accepted=8.0)
    assert found.speedup == pytest.approx(1, abs=0.02)
    assert found.speedup < 1


def test_a_lockstep_round_is_its_passes():
    work = Workload(QWEN, HARDWARE["H100-SXM"], 6, 9000, KERNELS)
    found = expect(work, k=3, s=0.05, accepted=2.0)

    def seconds(traffic):
        return pass_seconds(traffic, QWEN, work.hardware, KERNELS).total

    drafts = sum(seconds(draft_step(QWEN, 6, 9000, s=0.05, step=step)) for step in (1, 2, 3))
    verify = seconds(verify_pass(QWEN, 6, 9000, k=3))
    assert (found.draft_seconds, found.verify_seconds) == (drafts, verify)
    assert found.round_seconds == drafts + verify
    assert found.tokens_per_second == pytest.approx(6 * 3 / (drafts + verify))
    assert found.speedup == pytest.approx(found.tokens_per_second / found.plain_tokens_per_second)


def test_delayed_verification_takes_one_step_more():
    """k + 2 steps of B (2k + 1)/(k + 2) rows: 217.6 instead of 241.8 for B = 128, k = 8."""
    fixed = dataclasses.replace(KERNELS, pass_seconds=1.0)
    rounds = {
        schedule: expect(
            Workload(QWEN, HARDWARE["H200"], 128, 1000, fixed, schedule), **PAPER
        ).round_seconds
        for schedule in ("unified", "delayed")
    }
    assert round(rounds["unified"]) == 9
    assert round(rounds["delayed"]) == 10


def test_a_plan_never_loses_and_says_when_not_to_speculate():
    slow = Workload(QWEN, HARDWARE["H200"], 1, 1000, KERNELS)
    found = plan(slow, constant_acceptance(0.5), ss=(0.05,))
    assert (found.best.k, found.best.speedup) == (0, 1)
    assert len(found.tried) == 17
    fast = plan(
        dataclasses.replace(slow, batch=64, length=16384), constant_acceptance(0.94), ss=(0.05,)
    )
    assert fast.best.speedup == max(one.speedup for one in fast.tried) > 2


def test_a_plan_weighs_acceptance_against_s():
    table = AcceptanceTable({(8, 0.02): 3.0, (8, 0.05): 6.0, (8, 0.5): 6.5})
    work = Workload(QWEN, HARDWARE["H200"], 64, 16384, KERNELS, "unified")
    found = plan(work, table, ks=(4, 8))
    assert {one.s for one in found.tried} == {0.02, 0.05, 0.5}
    assert found.best.s == 0.05


def test_a_plan_may_use_measured_positions():
    chances = [0.95, 0.9, 0.5, 0.1]
    work = Workload(QWEN, HARDWARE["H200"], 64, 16384)
    found = plan(work, positional_acceptance(chances), ks=range(5), ss=(0.05,))
    assert found.best.k in (2, 3)
    with pytest.raises(ValueError, match="plan needs the shares"):
        plan(work, positional_acceptance(chances))


def test_break_even_points_are_where_the_sign_changes():
    work = Workload(QWEN, HARDWARE["H200"], 1, 16384, KERNELS, "unified")
    batch = break_even_batch(work, **PAPER)
    assert batch is not None and batch > 1
    gains = [
        expect(dataclasses.replace(work, batch=b), **PAPER).speedup for b in (batch - 1, batch)
    ]
    assert gains[0] < 1 <= gains[1]
    length = break_even_length(work, **PAPER)
    assert length is not None
    gains = [
        expect(dataclasses.replace(work, length=n), **PAPER).speedup for n in (length - 1, length)
    ]
    assert gains[0] < 1 <= gains[1]


@settings(max_examples=15)
@given(st.integers(2000, 40_000), st.integers(2000, 40_000))
def test_longer_contexts_break_even_at_smaller_batches(a, b):
    short, long = sorted((a, b))
    work = Workload(QWEN, HARDWARE["H200"], 1, short, KERNELS, "unified")
    at_short = break_even_batch(work, **PAPER)
    at_long = break_even_batch(dataclasses.replace(work, length=long), **PAPER)
    assert at_short is not None and at_long is not None
    assert at_long <= at_short


def test_what_never_pays_has_no_break_even_point():
    work = Workload(QWEN, HARDWARE["H200"], 1, 16384, KERNELS)
    assert break_even_batch(work, k=8, s=0.05, accepted=0.0) is None
    assert break_even_length(work, k=8, s=0.05, accepted=0.0, limit=50_000) is None


def test_the_bytes_of_a_token_shrink_by_the_bound():
    work = Workload(QWEN, HARDWARE["H200"], 8, 100_000, min_budget=1)
    found = expect(work, **PAPER)
    saved = found.plain_kv_bytes_per_token / found.kv_bytes_per_token
    assert saved == pytest.approx(attention_bound(8, 0.77, 0.05), rel=2e-3)


def test_recurrent_layers_pay_for_the_replay():
    config = {
        **KNOWN_MODELS["Qwen3-8B"],
        "layer_types": ["linear_attention", "full_attention"] * 18,
        **{"linear_num_value_heads": 32, "linear_num_key_heads": 16},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    }
    hybrid = shape_from_config(config)
    assert hybrid.has_state
    for schedule in ("lockstep", "unified"):
        work = Workload(hybrid, HARDWARE["H200"], 4, 20_000, KERNELS, schedule)
        kept = dataclasses.replace(
            hybrid, layers=tuple(dataclasses.replace(one, state=0) for one in hybrid.layers)
        )
        without = expect(dataclasses.replace(work, shape=kept), **PAPER)
        found = expect(work, **PAPER)
        # The replay streams every weight once more.
        streamed = kept.weights.dense * 2 / HARDWARE["H200"].bandwidth
        assert found.round_seconds - without.round_seconds > streamed


def test_experts_make_verification_dearer():
    """Nine rows touch more experts than one, so a verify pass streams more weights."""
    shape = shape_from_config(KNOWN_MODELS["Qwen3-30B-A3B"])
    plain, verify = plain_step(shape, 1, 1000), verify_pass(shape, 1, 1000, k=8)
    assert plain.weights < 0.11 * shape.resident_bytes
    assert verify.weights > 4 * plain.weights


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"length": 1.5}, "length must be an integer >= 1"),
        ({"min_budget": True}, "min_budget must be an integer"),
        ({"schedule": "random"}, "schedule must be one of lockstep, unified, delayed"),
        ({"scores": "all"}, "scores must be one of none"),
    ],
)
def test_a_bad_workload_is_refused(values, message):
    good = {"batch": 1, "length": 100}
    with pytest.raises(ValueError, match=message):
        Workload(QWEN, HARDWARE["H200"], **{**good, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k": -1}, "k must be an integer >= 0"),
        ({"accepted": 9.0}, "within 0 and k = 8, got 9.0"),
        ({"s": 0.0}, "0 < s <= 1"),
    ],
)
def test_a_bad_setting_is_refused(values, message):
    work = Workload(QWEN, HARDWARE["H200"], 1, 100)
    with pytest.raises(ValueError, match=message):
        expect(work, **{**PAPER, **values})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_selection_moves_is_paid_once_a_round(schedule):
    hardware = custom_hardware("a", bandwidth=1e12, flops=1e18, memory=80e9)
    work = Workload(QWEN, hardware, 32, 16384, schedule=schedule)
    dear = dataclasses.replace(work, selection_bytes=7.0)
    # 36 layers of 8 KV heads; the verified tokens are keys too.
    moved = 7.0 * 36 * 8 * (16384 + 9) * 32
    more = expect(dear, **PAPER).round_seconds - expect(work, **PAPER).round_seconds
    assert more == pytest.approx(moved / 1e12, rel=1e-6)
    with pytest.raises(ValueError, match="selection_bytes must be >= 0, got -1"):
        dataclasses.replace(work, selection_bytes=-1)
