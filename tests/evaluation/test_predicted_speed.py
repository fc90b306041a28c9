"""Theory says what a cell may reach, where it knows the machine."""

from __future__ import annotations

import pytest
import torch

from pillarattn.evaluation import predicted_speed
from pillarattn.evaluation.predicted_speed import (
    device_hardware,
    predicted_speedup,
    speedup_bounds,
)

CELL = {"batch": 64, "length": 8192, "k": 8, "s": 0.05, "mean_accepted": 6.0, "min_budget": 128}


def test_bounds_are_those_of_the_paper():
    low, high = speedup_bounds(8, 0.77, 0.05)
    assert low == pytest.approx((8 * 0.77 + 1) / 9)
    assert high == pytest.approx(5.114, abs=1e-3)


def test_an_unknown_machine_has_no_roofline(tiny_model):
    assert device_hardware(torch.device("cpu")) is None
    assert predicted_speedup(tiny_model("llama"), **CELL) is None


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("NVIDIA H200", "H200-measured"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA T4", None),
    ],
)
def test_a_driver_name_finds_its_hardware(monkeypatch, name, ours):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = device_hardware(torch.device("cuda"))
    assert (None if found is None else found.name) == ours


def test_a_known_machine_has_a_roofline_within_the_bounds(tiny_model, monkeypatch):
    from pillarattn.theory import hardware_named

    monkeypatch.setattr(predicted_speed, "device_hardware", lambda _: hardware_named("H100-SXM"))
    model = tiny_model("llama")
    found = predicted_speedup(model, **CELL)
    assert found["hardware"] == "H100-SXM"
    low, high = speedup_bounds(8, 6 / 8, 0.05)
    assert low < found["speedup"] < high
    longer = predicted_speedup(model, **{**CELL, "length": 65536})
    assert longer["speedup"] > found["speedup"]
    assert predicted_speedup(model, **{**CELL, "k": 0}) is None
