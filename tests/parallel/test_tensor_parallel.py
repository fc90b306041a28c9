"""Two ranks give what one process gives: tokens, drafts accepted, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pillarattn
from tests.parallel.cases import CASES, NEW_TOKENS, PROMPT_LENGTH, prompts
from tests.parallel.conftest import build_models, run_alone, run_ranks

NAMES = [case.name for case in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_what_one_process_gives(two_ranks: Any, name: str) -> None:
    alone, ranks, _ = two_ranks
    assert ranks[0][name]["tokens"] == alone[name]["tokens"]
    # The same drafts were accepted: the ranks chose their heads' keys as one process does, and a
    # list that heads share is shared by those of all ranks.
    assert ranks[0][name]["accepted"] == alone[name]["accepted"]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree(two_ranks: Any, name: str) -> None:
    _, ranks, _ = two_ranks
    assert ranks[0][name] == ranks[1][name]


def test_drafts_are_accepted_at_all(two_ranks: Any) -> None:
    alone, _, _ = two_ranks
    for name in ("llama/vegas", "qwen3/vegas", "llama/pillar"):
        assert sum(map(sum, alone[name]["accepted"])) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gpt_oss"])
def test_logits_are_the_same_bits(two_ranks: Any, family: str) -> None:
    _, ranks, _ = two_ranks
    assert ranks[0][f"{family}/logits"] == ranks[1][f"{family}/logits"]
    assert ranks[0][f"{family}/dense_reason"] is None


def test_cache_holds_a_ranks_heads(two_ranks: Any) -> None:
    _, ranks, _ = two_ranks
    assert [rank["cache heads"] for rank in ranks] == [[2, 2], [2, 2]]


def test_a_clock_stops_all_ranks_at_once(two_ranks: Any) -> None:
    _, ranks, _ = two_ranks
    assert len(ranks[0]["clock"][0]) == PROMPT_LENGTH + 7
    assert ranks[0]["clock"] == ranks[1]["clock"]


def test_a_gate_chooses_for_all_ranks(two_ranks: Any) -> None:
    _, ranks, _ = two_ranks
    assert ranks[0]["gate"] == ranks[1]["gate"]
    assert ranks[0]["gate"]["tokens"] == ranks[0]["gate"]["plain"]
    reasons = [one["reason"] for one in ranks[0]["gate"]["decisions"]]
    assert reasons[:2] == ["measure plain", "first probe"]


def test_different_prompts_are_refused(two_ranks: Any) -> None:
    _, ranks, _ = two_ranks
    for rank in ranks:
        assert rank["other prompts"].startswith("UnsupportedOptionError: the 2 ranks")


def test_heads_that_do_not_divide_are_refused(two_ranks: Any) -> None:
    _, ranks, _ = two_ranks
    for rank in ranks:
        assert rank["three KV heads"].startswith(
            "UnsupportedModelError: LlamaForCausalLM has 3 KV heads, which 2 ranks cannot share"
        )
        assert "start it on 3 ranks, on one" in rank["three KV heads"]


def test_the_way_out_of_the_refusal(two_ranks: Any) -> None:
    _, ranks, models = two_ranks
    model = pillarattn.patch(models["three"])
    plain = model.generate(prompts("cpu"), max_new_tokens=12, do_sample=False).tolist()
    assert [rank["three KV heads, gathered"] for rank in ranks] == [plain, plain]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus(tmp_path: Path, tiny_model: Callable[..., Any]) -> None:
    models = build_models(tmp_path, tiny_model)
    alone, ranks = run_alone(models, "cuda"), run_ranks(tmp_path, gpus=True)
    for name in NAMES:
        assert ranks[0][name] == ranks[1][name], name
        assert ranks[0][name]["tokens"] == alone[name]["tokens"], name
        assert len(alone[name]["tokens"][0]) == PROMPT_LENGTH + NEW_TOKENS
