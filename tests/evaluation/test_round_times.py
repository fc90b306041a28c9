"""A round's parts, and the speed-up that they make together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pillarattn import PillarConfig, SelfSpeculativeGenerator
from pillarattn.evaluation import compare
from pillarattn.evaluation.notebook_model import notebook_model
from pillarattn.evaluation.round_times import RoundTimes
from pillarattn.theory import Workload, expect, hardware_named, shape_from_model


@pytest.fixture(scope="module")
def loaded():
    return notebook_model(tiny=True)


@pytest.fixture(scope="module")
def found(loaded):
    model, tokenizer = loaded
    inputs = tokenizer("1 + 1 = 2. " * 8, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    pillar = SelfSpeculativeGenerator.from_config(PillarConfig(k=4, s=0.2, min_budget=8, recent=2))
    return compare(model, inputs, pillar, max_new_tokens=24)


def test_measured_parts_explain_the_measured_speedup(found):
    times = RoundTimes.from_comparison(found)
    stats = found.stats
    assert 1 <= times.k <= 4
    assert min(times.plain_step, times.draft_step, times.verify_pass, times.select) > 0
    spent = stats["draft_seconds"] + stats["verify_seconds"] + stats["select_seconds"]
    assert times.round * stats["rounds"] == pytest.approx(spent)
    # The first choice of keys lies before the first round; the loop itself is in no part.
    told = times.speedup(stats["emitted"] / stats["rounds"] - 1)
    assert told == pytest.approx(stats["emitted"] * times.plain_step / spent)
    assert told > 0.5 * found.decode_speedup


def test_theory_has_the_same_parts(loaded):
    workload = Workload(shape_from_model(loaded[0]), hardware_named("H200"), 4, 4096)
    expected = expect(workload, k=8, s=0.05, accepted=5.5)
    times = RoundTimes.from_theory(expected)
    assert times.speedup(5.5) == pytest.approx(expected.speedup)
    assert times.round == pytest.approx(expected.round_seconds)


def test_what_is_missing_is_named(found, loaded):
    bare = replace(found, plain=None)
    with pytest.raises(ValueError, match="no plain decode of at least two tokens"):
        RoundTimes.from_comparison(bare)
    assert RoundTimes.from_comparison(bare, plain=found.plain) == RoundTimes.from_comparison(found)
    with pytest.raises(ValueError, match="drafted nothing"):
        RoundTimes.from_comparison(replace(found, stats=found.stats | {"draft_steps": 0}))
    workload = Workload(shape_from_model(loaded[0]), hardware_named("H200"), 4, 4096)
    with pytest.raises(ValueError, match="k=0"):
        RoundTimes.from_theory(expect(workload, k=0, s=0.05, accepted=0))
    mixed = expect(replace(workload, schedule="unified"), k=4, s=0.05, accepted=2)
    with pytest.raises(ValueError, match="lockstep"):
        RoundTimes.from_theory(mixed)
