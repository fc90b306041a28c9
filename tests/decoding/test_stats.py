"""What each figure means, on rounds counted by hand."""

from __future__ import annotations

import json

import pytest

from pillarattn.decoding.stats import GenerationStats, RowRound


def round_of(row, start, drafted, accepted, emitted):
    """Return one row's round that read 10 keys a step of 50."""
    return RowRound(
        row=row,
        start=start,
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        draft_steps=drafted,
        keys_read=10.0 * drafted,
        keys_full=50.0 * drafted,
    )


ROUNDS = [round_of(0, 7, 4, 4, 5), round_of(1, 7, 4, 1, 2), round_of(0, 12, 3, 0, 1)]


@pytest.fixture
def stats():
    stats = GenerationStats()
    stats.count(ROUNDS, ends=[13, 9], k=4)
    return stats


def test_counts(stats):
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (3, 11, 5, 8)
    assert stats.accepted_per_round == [[4, 0], [1]]
    assert stats.drafted_by_position == [3, 3, 3, 2]
    assert stats.accepted_by_position == [2, 1, 1, 1]


def test_derived_figures(stats):
    assert stats.acceptance_rate == 5 / 11
    assert stats.mean_accepted == 5 / 3
    assert stats.acceptance_length == 8 / 3
    assert stats.acceptance_by_position == [2 / 3, 1 / 3, 1 / 3, 1 / 2]
    assert stats.keys_read_per_draft_step == 10
    assert stats.keys_full_per_draft_step == 50


def test_nothing_counted_is_zero_everywhere():
    empty = GenerationStats(drafted_by_position=[0], accepted_by_position=[0])
    assert all(v in (0, [0], [0.0], []) for v in empty.to_dict().values())
    assert "0 rounds" in str(empty)


def test_to_dict_and_text(stats):
    values = stats.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["acceptance_rate"] == stats.acceptance_rate
    assert values["rounds"] == 3 and values["keys_read_per_draft_step"] == 10
    assert str(stats) == (
        "3 rounds, 5 of 11 drafts accepted (45.5%), 2.67 tokens a round, "
        "10 of 50 keys read per draft step"
    )


def test_a_dict_is_a_copy(stats):
    values = stats.to_dict()
    stats.accepted_per_round[1].append(2)
    assert values["accepted_per_round"] == [[4, 0], [1]]


@pytest.mark.parametrize(
    ("end", "rounds", "accepted", "emitted", "drafted"),
    [
        (13, [4, 0], 4, 6, 7),
        (12, [4], 4, 5, 4),
        (11, [4], 4, 4, 4),
        (9, [2], 2, 2, 4),
        (7, [], 0, 0, 0),
    ],
)
def test_what_a_row_did_after_its_end_is_in_no_count(end, rounds, accepted, emitted, drafted):
    stats = GenerationStats()
    stats.count([ROUNDS[0], ROUNDS[2]], ends=[end], k=4)
    assert stats.accepted_per_round == [rounds] and stats.rounds == len(rounds)
    assert (stats.accepted, stats.emitted, stats.drafted) == (accepted, emitted, drafted)
    assert stats.draft_steps == drafted and stats.keys_read == 10 * drafted
    assert stats.accepted_by_position == [sum(n > j for n in rounds) for j in range(4)]


def test_a_run_fills_them(fakes):
    import torch

    lm = fakes.AttentionLM(seed=2)
    run = fakes.build_run(
        fakes.AttentionTarget(lm, torch.randint(0, lm.vocab, (2, 30))),
        new_tokens=21,
        s=0.1,
        min_budget=6,
    )
    stats = run.stats
    run.run()
    assert stats.emitted == 2 * 20 == stats.accepted + stats.rounds - cut(run)
    assert stats.rounds == sum(map(len, stats.accepted_per_round))
    assert stats.accepted == sum(map(sum, stats.accepted_per_round))
    assert sum(stats.accepted_by_position) == stats.accepted
    assert sum(stats.drafted_by_position) == stats.drafted
    assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)


def cut(run):
    """Rounds whose last token the length limit cut off: they emitted accepted drafts only."""
    total = 0
    for rounds in run.stats.accepted_per_round:
        whole = sum(a + 1 for a in rounds)
        total += whole - 20
    return total
