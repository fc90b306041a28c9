"""What a host's memory costs and gives, counted by hand."""

from __future__ import annotations

import pytest

from pillarattn.theory.hardware import hardware_named
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.links import Link
from pillarattn.theory.offload import hides, sequences_with_host, spilled_bytes_per_step, swap
from pillarattn.theory.shape_reading import shape_from_config

QWEN = shape_from_config(KNOWN_MODELS["Qwen3-8B"])
PCIE = Link("test", 50e9, 20e-6, "made up")


def test_a_sequence_moves_in_the_time_of_its_bytes():
    moved = 16_384 * 147_456
    one = swap(QWEN, 16_384, link=PCIE, step_seconds=0.01, recompute_seconds=0.5)
    assert one.bytes == moved
    assert one.seconds == pytest.approx(moved / 50e9 + 20e-6)
    assert one.hidden_steps == pytest.approx(one.seconds / 0.01)
    assert one.pays
    assert not swap(QWEN, 16_384, link=PCIE, step_seconds=0.01, recompute_seconds=0.01).pays
    with pytest.raises(ValueError, match="step_seconds must be positive"):
        swap(QWEN, 16_384, link=PCIE, step_seconds=0)


def test_what_a_full_device_must_push_out():
    assert spilled_bytes_per_step(QWEN, 128, 0.8) == pytest.approx(128 * 0.8 * 147_456)
    # 15 MB a step take 0.3 ms of the link.
    assert hides(QWEN, 128, tokens_per_step=0.8, step_seconds=0.006, link=PCIE)
    assert not hides(QWEN, 128, tokens_per_step=0.8, step_seconds=0.0002, link=PCIE)


def test_the_host_holds_more_sequences():
    device, both = sequences_with_host(QWEN, hardware_named("H200"), 16_384, host_memory=100e9, k=8)
    assert both - device == int(100e9 // (16_384 * 147_456)) == 41
    with pytest.raises(ValueError, match="host_memory must be >= 0"):
        sequences_with_host(QWEN, hardware_named("H200"), 16_384, host_memory=-1)
