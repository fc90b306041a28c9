"""Files of measurements: tables, statistics, and what is neither."""

from __future__ import annotations

import pytest

from pillarattn.decoding.stats import GenerationStats
from pillarattn.theory.acceptance_records import read_acceptance

RECORDS = [
    {"strategy": "pillar", "k": 8, "s": 0.05, "mean_accepted": 4.0},
    {"strategy": "pillar", "k": 8, "s": 0.1, "mean_accepted": 5.0},
    {"strategy": "uniform", "k": 8, "s": 0.05, "mean_accepted": 1.0},
]


def test_records_become_a_table():
    measured = read_acceptance(RECORDS, strategy="pillar")
    assert measured.mean(8, 0.1) == 5.0
    assert (measured.max_k, measured.ss) == (None, (0.05, 0.1))


def test_records_may_stand_under_a_key():
    assert read_acceptance({"records": RECORDS[:2]}).mean(8, 0.05) == 4.0


def test_statistics_of_a_run_become_chances_by_position():
    stats = GenerationStats(
        rounds=4, accepted=6, drafted_by_position=[4, 4], accepted_by_position=[4, 2]
    )
    for measured in (stats.to_dict(), {"command": "generate", "stats": stats.to_dict()}):
        found = read_acceptance(measured)
        assert found.mean(2, 0.05) == pytest.approx(stats.mean_accepted) == 1.5
        assert (found.max_k, found.ss) == (2, ())


@pytest.mark.parametrize("measured", [{"rounds": 3}, "text", 5, None])
def test_anything_else_is_refused(measured):
    with pytest.raises(ValueError, match="list of records with k, s and mean_accepted"):
        read_acceptance(measured)
