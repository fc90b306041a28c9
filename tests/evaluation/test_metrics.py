"""Figures over several batches are ratios of sums."""

from __future__ import annotations

import pytest

from pillarattn.decoding.stats import GenerationStats
from pillarattn.evaluation.batch_timing import BatchTimes
from pillarattn.evaluation.metrics import Tally, by_length
from pillarattn.evaluation.metrics_traffic import Traffic
from pillarattn.evaluation.tasks import Score


def add(tally, rounds, *, k=4, prompt=100, seconds=2.0, plain=4.0, correct=True):
    stats = GenerationStats(
        rounds=len(rounds),
        drafted=k * len(rounds),
        accepted=sum(rounds),
        emitted=sum(rounds) + len(rounds),
        accepted_per_round=[rounds],
        drafted_by_position=[len(rounds)] * k,
        accepted_by_position=[sum(a > j for a in rounds) for j in range(k)],
        keys_read=10.0 * len(rounds),
        keys_full=100.0 * len(rounds),
        draft_steps=k * len(rounds),
    )
    new = (stats.emitted + 1,)
    tally.add(
        stats,
        prompt_lengths=[prompt],
        times=BatchTimes(0.5, seconds, new),
        plain_times=None if plain is None else BatchTimes(0.5, plain, new),
        traffic=Traffic(10.0, 0.0, 10.0, 40.0, stats.emitted),
        scores=[Score(correct)],
    )


def test_two_batches_are_one_measurement():
    tally = Tally()
    add(tally, [4, 0])
    add(tally, [2], k=6, correct=False)
    found = tally.metrics()
    assert (found["rounds"], found["drafted"], found["accepted"], found["emitted"]) == (3, 14, 6, 9)
    assert found["acceptance_rate"] == 6 / 14
    assert found["mean_accepted"] == 2.0
    assert found["acceptance_length"] == 3.0
    assert found["acceptance_by_position"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0])
    assert found["keys_read_per_draft_step"] == 30 / 14
    assert found["kv_bytes_share"] == 0.5
    assert (found["examples"], found["judged"], found["correct"]) == (2, 2, 1)
    assert found["accuracy"] == 0.5
    assert found["mean_prompt_tokens"] == 100
    assert (found["mean_new_tokens"], found["new_tokens"]) == (5.5, 11)


def test_speed_is_of_all_tokens_over_all_seconds():
    tally = Tally()
    add(tally, [4, 0])
    found = tally.metrics()
    assert found["tokens_per_second"] == 6 / 2.0
    assert found["plain_tokens_per_second"] == 6 / 4.0
    assert found["decode_speedup"] == 2.0
    assert found["total_speedup"] == pytest.approx(4.5 / 2.5)


def test_what_was_not_measured_is_none():
    tally = Tally()
    add(tally, [1], plain=None, correct=None)
    found = tally.metrics()
    for name in ("plain_tokens_per_second", "decode_speedup", "total_speedup", "accuracy"):
        assert found[name] is None
    assert found["std_new_tokens"] is None
    empty = Tally().metrics()
    assert empty["acceptance_rate"] == 0.0
    assert empty["tokens_per_second"] is None


def test_lengths_fall_between_powers_of_two():
    bins = by_length([(255, 1), (256, 4), (511, 2), (512, 3), (1, 8)])
    assert bins == [
        {"from": 1, "to": 2, "rounds": 1, "mean_accepted": 8.0},
        {"from": 128, "to": 256, "rounds": 1, "mean_accepted": 1.0},
        {"from": 256, "to": 512, "rounds": 2, "mean_accepted": 3.0},
        {"from": 512, "to": 1024, "rounds": 1, "mean_accepted": 3.0},
    ]


def test_a_rounds_length_is_that_of_its_beginning():
    tally = Tally()
    add(tally, [4, 0, 1], prompt=250)
    # 250, then 255, then 256.
    assert [(one["from"], one["rounds"]) for one in tally.metrics()["by_length"]] == [
        (128, 2),
        (256, 1),
    ]
