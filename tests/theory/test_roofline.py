"""Roofline times: the published floors, the measured steps, and which ceiling wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarattn.errors import UnknownNameError
from pillarattn.theory import plain_step
from pillarattn.theory.hardware import HARDWARE, custom_hardware
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.roofline import (
    COMPILED,
    EFFICIENCIES,
    HF_GRAPH,
    KERNELS,
    Efficiency,
    efficiency_named,
    pass_seconds,
    roofline_seconds,
)
from pillarattn.theory.shape_reading import shape_from_config
from pillarattn.theory.traffic import Traffic, draft_step, gemm_traffic, verify_pass

CARD = custom_hardware("card", bandwidth=100.0, flops=1000.0, memory=1.0)


@pytest.mark.parametrize(("rows", "ms"), [(1, 3.52), (184, 3.53), (242, 4.64), (484, 9.27)])
def test_floors_of_the_linear_layers(qwen3_8b, copy_limited_h200, rows, ms):
    seconds = roofline_seconds(gemm_traffic(qwen3_8b, rows, rows), copy_limited_h200)
    assert seconds.total * 1e3 == pytest.approx(ms, abs=0.006)


@pytest.mark.parametrize(
    ("batch", "length", "ms"), [(1, 4096, 3.66), (8, 8192, 5.77), (32, 16384, 21.5)]
)
def test_floors_of_a_plain_step(qwen3_8b, copy_limited_h200, batch, length, ms):
    # The published table counts the step's own token among the cached ones.
    traffic = plain_step(qwen3_8b, batch, length - 1)
    seconds = pass_seconds(traffic, qwen3_8b, copy_limited_h200).total
    assert seconds * 1e3 == pytest.approx(ms, abs=0.01)


@pytest.mark.parametrize(
    ("name", "full", "draft"),
    [("Qwen3-1.7B", 26.7, 1.33), ("Qwen3-8B", 34.3, 1.71), ("Llama-3.1-8B", 30.5, 1.52)],
)
def test_floors_of_a_million_cached_tokens(name, full, draft, copy_limited_h200):
    shape = shape_from_config(KNOWN_MODELS[name])
    bandwidth = copy_limited_h200.bandwidth
    verified = verify_pass(shape, 1000, 991, k=8).kv_read / bandwidth
    assert verified * 1e3 == pytest.approx(full, abs=0.06)
    drafted = draft_step(shape, 10, 99_999, s=0.05, step=1).kv_gathered / bandwidth
    assert drafted * 1e3 == pytest.approx(draft, abs=0.006)


# One H200, torch 2.11, transformers 5.17, Qwen3-8B and SmolLM2-135M shapes in bf16: milliseconds of
# one plain step. The presets' costs were fitted to the Qwen3-8B rows; the last one checks them.
@pytest.mark.parametrize(
    ("preset", "name", "batch", "length", "measured"),
    [
        (COMPILED, "Qwen3-8B", 1, 16384, 6.27),
        (COMPILED, "Qwen3-8B", 32, 16384, 22.6),
        (HF_GRAPH, "Qwen3-8B", 1, 16384, 9.14),
        (HF_GRAPH, "Qwen3-8B", 32, 4096, 13.97),
        (HF_GRAPH, "Qwen3-8B", 32, 16384, 26.3),
        (HF_GRAPH, "SmolLM2-135M", 64, 8192, 6.2),
    ],
)
def test_presets_are_within_six_percent_of_what_was_measured(preset, name, batch, length, measured):
    shape = shape_from_config(KNOWN_MODELS[name])
    traffic = plain_step(shape, batch, length)
    seconds = pass_seconds(traffic, shape, HARDWARE["H200-measured"], preset).total
    assert seconds * 1e3 == pytest.approx(measured, rel=0.06)


def test_each_part_takes_the_slower_ceiling():
    by_bytes = roofline_seconds(Traffic(weights=500, gemm_flops=1000), CARD)
    assert (by_bytes.gemm, by_bytes.total) == (5, 5)
    by_flops = roofline_seconds(Traffic(weights=500, gemm_flops=9000), CARD)
    assert by_flops.gemm == 9
    attention = roofline_seconds(Traffic(kv_read=100, attention_flops=3000), CARD)
    assert attention.attention == 3
    parts = Traffic(weights=100, kv_read=200, kv_written=50, scores=300, state=400)
    seconds = roofline_seconds(parts, CARD)
    assert (seconds.gemm, seconds.attention, seconds.selection) == (1, 2.5 + 4, 3)
    assert seconds.total == 10.5


def test_losses_and_fixed_costs():
    half = Efficiency("half", weights=0.5, attention=0.25, gather=0.1, layer_seconds=2)
    traffic = Traffic(weights=100, kv_read=100, kv_gathered=100)
    seconds = roofline_seconds(traffic, CARD, half, layers=3, passes=2)
    assert seconds.gemm == 2
    assert seconds.attention == pytest.approx(4 + 10)
    assert seconds.fixed == 12


@given(st.sampled_from(list(EFFICIENCIES.values())), st.integers(1, 64), st.integers(1, 30_000))
def test_nothing_is_faster_than_the_ideal(preset, batch, length):
    shape = shape_from_config(KNOWN_MODELS["SmolLM2-135M"])
    traffic = plain_step(shape, batch, length)
    ideal = pass_seconds(traffic, shape, HARDWARE["H200"]).total
    assert pass_seconds(traffic, shape, HARDWARE["H200"], preset).total >= ideal
    assert ideal >= traffic.bytes / HARDWARE["H200"].bandwidth * (1 - 1e-12)


def test_presets_have_names_and_sources():
    assert efficiency_named("kernels") is KERNELS
    assert all(one.name == name and one.source for name, one in EFFICIENCIES.items())
    with pytest.raises(UnknownNameError, match="unknown efficiency 'best'; choose one of ideal"):
        efficiency_named("best")


@pytest.mark.parametrize("values", [{"weights": 0}, {"gather": 1.2}, {"layer_seconds": -1}])
def test_an_efficiency_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match="efficiency 'mine'"):
        Efficiency("mine", **values)
