"""Ceilings are rates of this machine, in bytes and FLOPs a second."""

from __future__ import annotations

import pytest
import torch

from pillarattn.evaluation import machine_ceilings
from pillarattn.evaluation.machine_ceilings import measure_ceilings


def test_rates_follow_from_sizes_and_times(monkeypatch):
    asked = []

    def seconds(work, device, repeats):
        asked.append(work().numel())
        return {1: 0.5, 2048: 0.25, 32 * 32: 1e-3}[asked[-1]]

    monkeypatch.setattr(machine_ceilings, "_seconds", seconds)
    found = measure_ceilings("cpu", megabytes=8, size=32)
    assert found.bandwidth == 8 * 2**20 / 0.25
    assert found.flops == 2 * 32**3 / 1e-3
    assert found.measured and "threads" in found.name
    half = {1: 0.5, 4096: 0.25, 32 * 32: 1e-3}
    monkeypatch.setattr(machine_ceilings, "_seconds", lambda work, *_: half[work().numel()])
    assert measure_ceilings("cpu", dtype="bfloat16", megabytes=8, size=32).bandwidth == 2**25


def test_a_real_machine_reads_more_than_a_disk_and_less_than_a_miracle():
    found = measure_ceilings("cpu", megabytes=16, size=128, repeats=2)
    assert 1e8 < found.bandwidth < 1e13
    assert 1e7 < found.flops < 1e15
    assert found.memory > 1e8


def test_the_least_time_counts_and_the_first_does_not(monkeypatch):
    clock = iter([0.0, 0.1, 1.0, 1.5, 2.0, 2.3])
    monkeypatch.setattr(machine_ceilings, "perf_counter", lambda: next(clock))
    least = machine_ceilings._seconds(lambda: None, torch.device("cpu"), 2)
    assert least == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["megabytes", "size", "repeats"])
def test_sizes_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        measure_ceilings("cpu", **{name: 0})
