"""vLLM itself serves a tiny model on the CPU, plainly and with sparse self-drafts.

Skipped where vLLM is not installed; see docs/vllm.md for how to install it for a CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
# Uneven lengths, one of which fills more than one block of 128 tokens.
PROMPTS = [list(range(3, 40)), list(range(50, 90)), [(7 * i) % 120 + 1 for i in range(170)]]
LIMIT = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama on the disk; vLLM's CPU attention wants heads of 32 at least."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.25,
        max_position_embeddings=1024, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    where = tmp_path_factory.mktemp("served")
    LlamaForCausalLM(config).eval().save_pretrained(where)
    return where


def serve(folder: Path, k: int, s: float = 0.5, **changes: Any) -> dict[str, Any]:
    options = changes.pop("options", {"s": s, "min_budget": 4, "recent": 2})
    asked = {"k": k, "options": options, "prompts": PROMPTS, "new_tokens": 40, **changes}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serve.py")), str(folder), json.dumps(asked)],
        env={**os.environ, "OMP_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return serve(folder, 0)


def test_the_whole_context_is_accepted_whole(folder: Path, plain: dict[str, Any]) -> None:
    found = serve(folder, 4, s=1.0)
    assert found["tokens"] == plain["tokens"]
    # 40 tokens, one of the prompt's pass: 8 rounds of 5, the last of which is cut off by 1.
    assert set(found["accepted_by_position"]) == {24}


@pytest.mark.parametrize("s", [0.02, 0.8])
def test_a_share_is_lossless(folder: Path, plain: dict[str, Any], s: float) -> None:
    found = serve(folder, 3, s=s)
    assert found["tokens"] == plain["tokens"]
    assert sum(found["accepted_by_position"]) < found["drafted"]


def test_a_prompt_in_chunks(folder: Path, plain: dict[str, Any]) -> None:
    found = serve(folder, 4, s=1.0, batched_tokens=64)
    assert found["tokens"] == plain["tokens"]
    assert sum(found["accepted_by_position"]) == found["drafted"]


def test_the_end_of_the_context(folder: Path) -> None:
    # 170 + 40 tokens of 212: the last rounds have no room for four drafts.
    ends = [serve(folder, k, s=1.0, max_model_len=212)["tokens"] for k in (0, 4)]
    assert ends[0] == ends[1]


def test_sampling_runs(folder: Path) -> None:
    found = serve(folder, 4, s=0.8, temperature=1.0)
    assert [len(tokens) for tokens in found["tokens"]] == [40, 40, 40]


def test_unknown_options_are_refused(folder: Path) -> None:
    with pytest.raises(AssertionError, match="may hold s, min_budget, recent and sink"):
        serve(folder, 4, options={"share": 0.5})
