"""Simulated machines and requests: times by hand, lengths with a heavy tail."""

from __future__ import annotations

import dataclasses

import pytest

from pillarattn.engine.workload import Machine, Workload


def test_time_is_bytes_and_flops():
    machine = Machine(weight_bytes=10.0, bandwidth=5.0, flops=20.0, kv_bytes=2)
    # Few rows stream weights; eight rows of ten bytes take 80 / 20 seconds.
    assert machine.step_seconds(1, 0) == 2.0
    assert machine.step_seconds(8, 0) == 4.0
    assert machine.step_seconds(1, 10) == 6.0


def test_lengths_are_heavy_tailed_and_seeded():
    work = Workload(requests=4000, mean=1000, deviation=800, max_tokens=10**6)
    lengths = sorted(work.lengths())
    assert lengths == sorted(work.lengths())
    assert sum(lengths) / 4000 == pytest.approx(1000, rel=0.05)
    # The longest hundredth is several times the median.
    assert lengths[3960] > 4 * lengths[2000]
    assert max(dataclasses.replace(work, max_tokens=700).lengths()) == 700
