"""A small model in strict fp32: ranks give the tokens of one device, whatever is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import pillarattn
from benchmarks.rank_model import config_of, load_on_ranks, same_on_all

PROMPT, NEW = 300, 48
# initializer_range: small weights make greedy text repeat one token.
SHAPE = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "initializer_range": 0.2}  # fmt: skip
SETTINGS: tuple[dict[str, Any], ...] = (
    {"k": 0},
    {"k": 8, "s": 0.05},
    {"k": 8, "s": 0.5},
    # Every key: almost all drafts of a whole model are accepted.
    {"k": 8, "s": 1.0},
    {"k": 4, "s": 0.2, "strategy": "vegas"},
    {"k": 4, "s": 0.5, "seed": 3},
)


def check_equality(name: str, folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """Decode each setting on this rank's device alone and on all ranks; return one record each."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = config_of(name, tiny=True, **SHAPE)
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    dist.barrier()
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    shared = load_on_ranks(folder, torch.float32)
    records = []
    plain = _decode(alone, {"k": None}, device)
    for model in (alone, shared):
        pillarattn.patch(model)
    for setting in SETTINGS:
        want, _ = _decode(alone, setting, device)
        got, stats = _decode(shared, setting, device)
        greedy = "seed" not in setting
        records.append(
            {
                "kind": "tensor_parallel_equality",
                "model": name,
                "dtype": "float32",
                "setting": setting,
                "tokens_equal_one_device": torch.equal(got, want),
                "tokens_equal_stock_generate": torch.equal(got, plain[0]) if greedy else None,
                "ranks_identical": same_on_all(got),
                "acceptance_rate": None if stats is None else stats.acceptance_rate,
            }
        )
    return records


def _decode(model: Any, setting: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, Any]:
    ids = torch.randint(1, 1024, (4, PROMPT), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": "seed" in setting, "top_k": 0}
    if setting["k"] is None:
        return model.generate(ids.to(device), **options), None
    assistant = pillarattn.SelfSpeculativeGenerator(**setting)
    out = model.generate(ids.to(device), assistant=assistant, **options)
    return out, assistant.stats
