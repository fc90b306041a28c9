"""Models of known shapes with random weights on each rank, and caches full of random keys."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pillarattn import PillarCache
from pillarattn.theory.known_models import KNOWN_MODELS

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}  # fmt: skip
_CLASSES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def start_ranks() -> tuple[int, int, torch.device]:
    """Join the group that `torchrun` describes; return rank, ranks and this one's device."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Ranks that lose each other end soon, with the records so far.
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit)
    return rank, ranks, device


def config_of(name: str, *, tiny: bool, **changes: Any) -> Any:
    """Return the config of a known model, or of one of its family that is tiny."""
    fields = dict(KNOWN_MODELS[name])
    family = fields.pop("model_type")
    if tiny:
        fields.update(TINY)
    # Random text never ends, and positions reach as far as the longest cell.
    fields.update({"max_position_embeddings": 1 << 17, "bos_token_id": None, "eos_token_id": None,
                   "pad_token_id": 0, "architectures": [_CLASSES[family]], **changes})  # fmt: skip
    return AutoConfig.for_model(family, **fields)


def save_stub(config: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint without weights: `from_pretrained` makes them, each rank its own part."""
    config.save_pretrained(folder)
    norm = {"model.norm.weight": torch.ones(config.hidden_size, dtype=dtype)}
    save_file(norm, folder / "model.safetensors", metadata={"format": "pt"})


def load_on_ranks(folder: Path, dtype: torch.dtype) -> Any:
    """Load a checkpoint over all ranks; weights that it lacks are random, with one seed on all.

    Parts of a split matrix then hold the same numbers on each rank, which no timing sees.
    """
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, tp_plan="auto").eval()


def local_kv_heads(model: Any) -> int:
    """Return the KV heads of this rank, read from the first layer's weights."""
    attention = model.model.layers[0].self_attn
    weight = attention.k_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return int(local.shape[0]) // int(attention.head_dim)


def random_cache(model: Any, *, batch: int, tokens: int, room: int) -> PillarCache:
    """Return a cache of `tokens` random tokens a row, with place for `room` more."""
    cache = PillarCache(limit=tokens + room, config=model.config)
    heads, width = local_kv_heads(model), int(model.model.layers[0].self_attn.head_dim)
    shape = (batch, heads, tokens, width)
    keys, values = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    for index in range(model.config.num_hidden_layers):
        cache.update(keys.normal_(), values.normal_(), index)
    return cache


def release() -> None:
    """Give freed memory back, so that the next cell may have all of it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def same_on_all(values: torch.Tensor) -> bool:
    """Whether every rank has these integers."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.contiguous())
    return all(torch.equal(values, other) for other in gathered)
