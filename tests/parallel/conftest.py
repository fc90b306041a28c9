"""Runs two ranks once, and the same generations in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pillarattn
from tests.parallel.cases import CASES, decode

SCRIPT = Path(__file__).with_name("rank_script.py")
# An even vocabulary: transformers 5.17 splits no other one.
HEADS = {"vocab_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
LIMIT = 240


def build_models(folder: Path, tiny_model: Callable[..., Any]) -> dict[str, Any]:
    """Save tiny models with 4 KV heads, and one with 3, and return them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    models = {family: tiny_model(family, **HEADS) for family in ("llama", "qwen3")}
    three = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    models["three"] = tiny_model("llama", **{**HEADS, **three})
    shape = models["llama"].config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "head_dim", "initializer_range",
             "pad_token_id", "bos_token_id", "eos_token_id")  # fmt: skip
    shape = {name: shape[name] for name in names}
    own = {
        "olmo2": {},
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    }
    for family, fields in own.items():
        config = AutoConfig.for_model(family, **shape, **fields)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            models[family] = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return models


def run_ranks(folder: Path, *, gpus: bool) -> list[dict[str, Any]]:
    """Return what each of two ranks found."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), str(folder)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def run_alone(models: dict[str, Any], device: str) -> dict[str, Any]:
    """Return what one process gets."""
    found = {}
    for case in CASES:
        model = pillarattn.patch(models[case.family].to(device))
        torch.manual_seed(5)
        found[case.name] = decode(case, model)
    return found


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return what one process, and each of two gloo ranks, found; and the models."""
    folder = tmp_path_factory.mktemp("ranks")
    models = build_models(folder, tiny_model)
    return run_alone(models, "cpu"), run_ranks(folder, gpus=False), models
