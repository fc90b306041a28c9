"""Ranks hold shares of a model; communication and waiting are counted by hand."""

from __future__ import annotations

import pytest

from pillarattn.theory.hardware import hardware_named
from pillarattn.theory.known_models import KNOWN_MODELS
from pillarattn.theory.links import LINKS, Link, link_named
from pillarattn.theory.parallel import (
    expect_on_ranks,
    pass_communication,
    pipeline_bubble,
    pipeline_seconds,
    shard,
)
from pillarattn.theory.planner import Workload, expect
from pillarattn.theory.shape_reading import shape_from_config

QWEN = shape_from_config(KNOWN_MODELS["Qwen3-8B"])
LINK = Link("test", 100e9, 10e-6, "made up")
H200 = hardware_named("H200-measured")


def test_a_rank_holds_its_share():
    half = shard(QWEN, 2)
    assert half.resident_bytes == pytest.approx(QWEN.resident_bytes / 2, rel=1e-6)
    assert half.kv_bytes_per_token == QWEN.kv_bytes_per_token / 2 == 147_456 / 2
    assert {layer.kv_heads for layer in half.layers} == {4}
    assert half.hidden == QWEN.hidden
    assert shard(QWEN, 1) is QWEN


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("SmolLM2-135M", 2, "3 KV heads and 9 query heads do not divide by 2 ranks"),
        ("DeepSeek-V3", 2, "latents|do not divide"),
        ("Qwen3-8B", 0, "ranks must be an integer >= 1, got 0"),
    ],
)
def test_what_cannot_be_split_is_refused(name, ranks, message):
    with pytest.raises(ValueError, match=message):
        shard(shape_from_config(KNOWN_MODELS[name]), ranks)


def test_communication_of_a_pass_by_hand():
    rows = 16
    reduced = 2 * rows * 4096 * 2 * (1 / 2) / 100e9 + 10e-6
    gathered = rows * 151_936 * 2 * (1 / 2) / 100e9 + 10e-6
    assert pass_communication(QWEN, rows, ranks=2, link=LINK) == pytest.approx(
        73 * reduced + gathered
    )
    assert pass_communication(QWEN, rows, ranks=1, link=LINK) == 0


def test_a_round_pays_for_k_small_passes_and_a_large_one():
    workload = Workload(QWEN, H200, 16, 8192)
    found = expect_on_ranks(workload, ranks=2, link=LINK, k=8, s=0.05, accepted=6.16)
    small = pass_communication(QWEN, 16, ranks=2, link=LINK)
    large = pass_communication(QWEN, 16 * 9, ranks=2, link=LINK)
    assert found.plain_communication == small
    assert found.round_communication == pytest.approx(8 * small + large)
    assert found.round_seconds == found.local.round_seconds + found.round_communication
    expected = found.plain_seconds * 7.16 / found.round_seconds
    assert found.speedup == pytest.approx(expected)
    # Latency weighs on k + 1 passes of a round and on one step for each plain token.
    free = expect_on_ranks(workload, ranks=2, link=link_named("none"), k=8, s=0.05, accepted=6.16)
    assert free.speedup > found.speedup


def test_one_rank_is_the_planner_itself():
    workload = Workload(QWEN, H200, 16, 8192, schedule="unified")
    found = expect_on_ranks(workload, ranks=1, link=LINK, k=8, s=0.05, accepted=6.16)
    assert found.speedup == pytest.approx(expect(workload, k=8, s=0.05, accepted=6.16).speedup)


def test_half_the_weights_a_card_leave_more_for_attention():
    """Published for full H200s at 16k tokens and more, nothing lost: 3.2 on one, 3.9 on two."""
    found = []
    for ranks in (1, 2):
        free = ranks * H200.memory * 0.96 - QWEN.resident_bytes
        batch = int(free // QWEN.cache_bytes(32_768))
        workload = Workload(QWEN, H200, batch, 32_768, schedule="unified", scores="none")
        one = expect_on_ranks(
            workload, ranks=ranks, link=link_named("none"), k=8, s=0.05, accepted=8 * 0.77
        )
        found.append(one.speedup)
    assert found == pytest.approx([3.2, 3.9], abs=0.1)


def test_a_pipeline_waits_with_too_few_microbatches():
    assert pipeline_seconds(0.01, stages=4, microbatches=1) == pytest.approx(0.04)
    assert pipeline_seconds(0.01, stages=4, microbatches=8) == pytest.approx(0.08)
    assert pipeline_seconds(0.01, stages=4, microbatches=4, hop_seconds=0.001) == pytest.approx(
        0.044
    )
    assert pipeline_seconds(0.01, stages=1, microbatches=1, hop_seconds=0.001) == 0.01
    assert (pipeline_bubble(4, 1), pipeline_bubble(4, 8)) == (0.75, 0.0)
    with pytest.raises(ValueError, match="stages must be an integer >= 1, got 0"):
        pipeline_seconds(0.01, stages=0, microbatches=1)


def test_links_have_names_and_sources():
    assert link_named("NVLink-4").bandwidth == 450e9
    assert all(link.source for link in LINKS.values())
    with pytest.raises(ValueError, match="unknown link 'token ring'"):
        link_named("token ring")
    with pytest.raises(ValueError, match="positive bandwidth"):
        Link("bad", 0, 0, "")
    assert LINK.all_reduce(1e9, 4) == pytest.approx(10e-6 + 2e9 * 0.75 / 100e9)
    assert LINK.all_reduce(1e9, 1) == LINK.send(0) == 0
