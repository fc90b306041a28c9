"""A small simulated day: every request is served, twice the same, and by the engine's scheduler."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from pillarattn.engine.scheduler_config import SchedulerConfig
from pillarattn.evaluation.cluster_day import MODES, Arrival, Day, Replica, arrivals, simulate_day
from pillarattn.evaluation.step_clock import StepClock
from pillarattn.theory import efficiency_named, hardware_named, link_named, shape_from_config
from pillarattn.theory.known_models import KNOWN_MODELS

SHAPE = shape_from_config(KNOWN_MODELS["Qwen3-8B"], name="Qwen3-8B")
SMALL = Day(requests=40, seconds=30.0, output_median=60.0, most_output=600, seed=3)


def clock(mode="unified", ranks=1, **changes):
    hardware = replace(hardware_named("H200-measured"), **changes)
    return StepClock(
        SHAPE, hardware, link_named("NVLink-4"), efficiency_named("compiled"),
        ranks=ranks, k=0 if mode == "plain" else 8,
    )  # fmt: skip


def run(mode="unified", *, day=SMALL, replicas=2, ranks=1, accepted=6.16, **changes):
    return simulate_day(
        day, clock(mode, ranks, **changes), mode=mode, replicas=replicas, accepted=accepted
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_token_is_emitted_once(mode):
    record = run(mode)
    wanted = arrivals(SMALL)
    assert record["requests"] == len(wanted)
    assert record["tokens"] == sum(request.output for request in wanted)
    assert record["is_simulation"] is True
    assert 0 < record["busy_share"] <= 1
    assert record["token_ms"]["p50"] > 0
    # Strict JSON: no NaN.
    json.loads(json.dumps(record, allow_nan=False))


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_is_the_same_day(mode):
    assert run(mode) == run(mode)
    assert run(mode) != run(mode, day=replace(SMALL, seed=4))


def test_all_modes_serve_the_same_requests():
    days = [run(mode) for mode in MODES]
    assert len({(day["requests"], day["tokens"], day["prompt_tokens"]) for day in days}) == 1
    assert days[0]["hours"][15]["arrivals"] == days[1]["hours"][15]["arrivals"]


def test_hours_follow_the_pattern():
    came = arrivals(Day(requests=4000, seconds=2400.0, seed=1))
    assert 3700 < len(came) < 4300
    night = sum(request.at < 600 for request in came)
    noon = sum(1200 <= request.at < 1800 for request in came)
    # Six hours around 3 and around 15: 1 -/+ 0.7 * sin(pi/4) / (pi/4) of the mean.
    assert night == pytest.approx(370, rel=0.2)
    assert noon == pytest.approx(1630, rel=0.1)
    lengths = sorted(request.output for request in came)
    assert lengths[len(lengths) // 2] == pytest.approx(1500, rel=0.1)
    # The longest hundredth has more than a twentieth of all tokens.
    assert sum(lengths[-len(lengths) // 100 :]) > 0.05 * sum(lengths)


def alone(mode, accepted=6.16, output=400):
    """Return a replica that has served one long request."""
    config = SchedulerConfig(num_blocks=4000, block_size=16, prefill_chunk=2048)
    replica = Replica(clock(mode), config, accepted=accepted, seed=0)
    replica.add(Arrival("a", 1.0, 900, output), most_output=1000)
    replica.run_until(math.inf)
    return replica


def test_one_request_alone():
    plain = alone("plain")
    # One step for the prompt, whose end gives the first token.
    assert len(plain.steps) == 400
    request = plain.requests["a"]
    assert request.first_token == pytest.approx(1.0 + plain.steps[0][1])
    assert request.end == plain.now
    # All drafts accepted: nine tokens in nine steps; none accepted: one token in nine.
    assert alone("unified", accepted=8.0).steps[-1][2] > 1
    assert 400 < len(alone("unified", accepted=8.0).steps) < 420
    assert len(alone("unified", accepted=0.0).steps) > 8 * 399


def test_acceptance_is_what_was_asked_for():
    replica = alone("unified", accepted=4.0, output=1000)
    rounds = [step[2] for step in replica.steps if step[2]][1:-1]
    assert sum(rounds) / len(rounds) == pytest.approx(5.0, rel=0.1)


def test_too_little_memory_evicts_and_still_serves_all():
    day = replace(SMALL, requests=60, seconds=5.0, output_median=500.0, most_output=2000)
    # Room for some 10,000 tokens beside the weights.
    tight = run("unified", replicas=1, day=day, memory=19.4e9)
    assert tight["scheduler"]["num_blocks"] < 200
    assert tight["evictions"] > 0
    assert tight["tokens"] == sum(request.output for request in arrivals(day))


def test_more_ranks_answer_sooner():
    assert run(replicas=1, ranks=2)["token_ms"]["p50"] < run(replicas=2)["token_ms"]["p50"]


def test_what_is_refused():
    with pytest.raises(ValueError, match="mode must be one of plain, unified, lockstep"):
        run("both")
    with pytest.raises(ValueError, match="with k = 8"):
        simulate_day(SMALL, clock("unified"), mode="plain", replicas=1, accepted=6.0)
    with pytest.raises(ValueError, match="a swing within"):
        Day(swing=1.5)
