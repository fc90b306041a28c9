"""Named devices: found under any spelling, sourced, and refused when wrong."""

from __future__ import annotations

import pytest

from pillarattn.errors import UnknownNameError
from pillarattn.theory.hardware import HARDWARE, Hardware, custom_hardware, hardware_named


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h200", "H200"),
        ("H100 SXM", "H100-SXM"),
        ("h100_sxm", "H100-SXM"),
        ("rtx 4090", "RTX-4090"),
        ("a100-80gb", "A100-80GB"),
        ("h200 measured", "H200-measured"),
    ],
)
def test_spelling_does_not_matter(spelling, name):
    assert hardware_named(spelling) is HARDWARE[name]


def test_every_device_says_where_its_numbers_come_from():
    for hardware in HARDWARE.values():
        assert len(hardware.source) > 15
        assert 1e11 < hardware.bandwidth < 2e13
        assert 1e13 < hardware.flops < 5e15
        assert 1e10 < hardware.memory < 3e11


def test_what_was_measured_stays_below_the_datasheet():
    reached, peak = HARDWARE["H200-measured"], HARDWARE["H200"]
    assert reached.measured and not peak.measured
    assert reached.bandwidth < peak.bandwidth
    assert reached.flops < peak.flops
    # nvidia-smi counts 143771 MiB, which is more than the 141 GB of the datasheet.
    assert reached.memory == 143771 * 1024 * 1024 > peak.memory


@pytest.mark.parametrize(("bandwidth", "rows"), [(4.3e12, 184), (3.0e12, 263)])
def test_rows_where_arithmetic_takes_over(bandwidth, rows):
    hardware = custom_hardware("card", bandwidth=bandwidth, flops=790e12, memory=1e11)
    assert round(hardware.balance_rows) == rows


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="unknown hardware 'h300'; choose one of H200-meas"):
        hardware_named("h300")


@pytest.mark.parametrize("field", ["memory", "bandwidth", "flops"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_device_needs_positive_numbers(field, value):
    numbers = {"memory": 1e9, "bandwidth": 1e9, "flops": 1e9, field: value}
    with pytest.raises(ValueError, match=f"{field} of hardware 'cpu' must be positive"):
        Hardware(name="cpu", source="test", **numbers)
