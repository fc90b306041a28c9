"""A step of equal requests takes what the theory says of it."""

from __future__ import annotations

import pytest

from pillarattn.engine.step_plan import PrefillChunk, StepPlan
from pillarattn.evaluation.step_clock import StepClock
from pillarattn.theory import (
    Workload,
    efficiency_named,
    expect_on_ranks,
    hardware_named,
    link_named,
    max_sequences,
    shape_from_config,
)
from pillarattn.theory.known_models import KNOWN_MODELS

SHAPE = shape_from_config(KNOWN_MODELS["Qwen3-8B"])
H200 = hardware_named("H200-measured")
COMPILED = efficiency_named("compiled")
NAMES = tuple(f"r{i}" for i in range(18))
LENGTH = 5000


def clock(ranks=1, k=8):
    return StepClock(SHAPE, H200, link_named("NVLink-4"), COMPILED, ranks=ranks, k=k)


def theory(ranks, k):
    workload = Workload(SHAPE, H200, batch=len(NAMES), length=LENGTH, efficiency=COMPILED,
                        schedule="lockstep")  # fmt: skip
    return expect_on_ranks(
        workload, ranks=ranks, link=link_named("NVLink-4"), k=k, s=0.05, accepted=0.7 * k
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plain_step(ranks):
    plan = StepPlan(verifies=tuple((name, 1) for name in NAMES))
    cached = dict.fromkeys(NAMES, LENGTH)
    seconds = clock(ranks, k=0).seconds(plan, cached, dict.fromkeys(NAMES, 0))
    assert seconds == pytest.approx(theory(ranks, 0).plain_seconds, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_lockstep_round(ranks):
    cached, spent = dict.fromkeys(NAMES, LENGTH), 0.0
    for step in range(8):
        plan = StepPlan(drafts=NAMES)
        spent += clock(ranks).seconds(plan, cached, dict.fromkeys(NAMES, step))
    plan = StepPlan(verifies=tuple((name, 9) for name in NAMES))
    spent += clock(ranks).seconds(plan, cached, dict.fromkeys(NAMES, 8))
    assert spent == pytest.approx(theory(ranks, 8).round_seconds, rel=1e-12)


def test_lengths_count_one_by_one():
    plan = StepPlan(drafts=("a", "b"), verifies=(("c", 9), ("d", 4)))
    lengths = {"a": 100, "b": 9000, "c": 2000, "d": 4000}
    drafts = {"a": 0, "b": 5, "c": 8, "d": 3}
    read = clock().traffic(plan, lengths, drafts)
    values = SHAPE.layers[0].read * len(SHAPE.layers) * SHAPE.kv_bytes
    # min(100, 128) + 1, and 5 % of 9000 and six drafts.
    assert read.kv_gathered == values * (101 + 456)
    assert read.kv_read == values * (2009 + 4004)


def test_a_prompt_costs_more_than_its_weights():
    chunk = PrefillChunk("a", start=0, tokens=2048, is_last=False, emits=False)
    alone = clock().seconds(StepPlan(prefills=(chunk,)), {}, {})
    assert alone > 2048 * 2 * SHAPE.weights.dense / (H200.flops * COMPILED.matrix)
    later = PrefillChunk("a", start=30000, tokens=2048, is_last=False, emits=False)
    assert clock().seconds(StepPlan(prefills=(later,)), {}, {}) > alone


def test_no_rows_take_no_time():
    assert clock(2).seconds(StepPlan(), {}, {}) == 0.0


def test_pool():
    one, two = clock(1, k=0).pool_tokens(), clock(2, k=0).pool_tokens()
    assert one // LENGTH == max_sequences(SHAPE, H200, LENGTH)
    # Weights are shared out, and so is each token.
    assert two > 2 * one
    assert clock(1, k=8).pool_tokens() < one


def test_other_models_are_refused():
    shape = shape_from_config(KNOWN_MODELS["gpt-oss-20b"])
    with pytest.raises(ValueError, match="layers must all be alike"):
        StepClock(shape, H200, link_named("none"))
