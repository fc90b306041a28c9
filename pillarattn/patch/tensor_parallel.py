"""The ranks of a tensor-parallel model: who they are, and whether its heads fit them.

Heads are local to a rank, so patterns, scores and Top-K are; what must be the same everywhere is
every choice that ends in tokens, or in another number of forward passes (`agreed_choices`).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pillarattn.errors import UnsupportedOptionError

# Projections whose output holds keys, or what keys are made of head by head.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")


@dataclass(frozen=True)
class Ranks:
    """The processes that hold one model together.

    Attributes:
        group: their process group.
        size: how many they are, at least 2.
        device: where tensors must lie for the group's backend.
    """

    group: Any
    size: int
    device: torch.device

    def first(self, values: Tensor) -> Tensor:
        """Return what the first rank has here, the same shape and dtype on all; not bool."""
        shared = values.to(self.device).contiguous()
        dist.broadcast(shared, src=dist.get_global_rank(self.group, 0), group=self.group)
        return shared.to(values.device)

    def first_numbers(self, values: list[int]) -> list[int]:
        """Return the first rank's integers; as many on all ranks."""
        return self.first(torch.tensor(values, dtype=torch.int64, device=self.device)).tolist()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over the ranks."""
        total = values.to(self.device, copy=True).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.div_(self.size).to(values.device)

    def worst(self, value: float) -> float:
        """Return the largest value of any rank; NaN counts as infinite."""
        mine = torch.tensor([inf if isnan(value) else value], device=self.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self.group)
        return float(mine)

    def check_same(self, what: str, *parts: Any) -> None:
        """Raise on every rank if `parts` (tensors, or what has a `repr`) differ between ranks.

        Raises:
            UnsupportedOptionError: names `what`.
        """
        digest = hashlib.blake2b(digest_size=8)
        for part in parts:
            if isinstance(part, Tensor):
                digest.update(repr((tuple(part.shape), part.dtype)).encode())
                part = part.detach().cpu().reshape(-1).tolist()
            # The same object lies elsewhere in each process.
            digest.update(re.sub(r"0x[0-9a-f]+", "", repr(part)).encode())
        # Signed and with a bit to spare: what both backends gather.
        mine = torch.tensor([int.from_bytes(digest.digest()) >> 1], device=self.device)
        all_of = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_of, mine, group=self.group)
        if any(int(other) != int(mine) for other in all_of):
            raise UnsupportedOptionError(
                f"the {self.size} ranks of a tensor-parallel model were given different {what}; "
                "give every rank the same, or use one whole model a process (data parallel)"
            )


def ranks_of(model: Any) -> Ranks | None:
    """Return the ranks that a model's tensor-parallel plan spreads it over; None: it is whole."""
    mesh = getattr(model, "_device_mesh", None)
    size = getattr(model, "_tp_size", None) or 1
    if mesh is None or size < 2 or not dist.is_available() or not dist.is_initialized():
        return None
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return Ranks(group, size, device)


def kv_head_refusal(model: Any) -> str | None:
    """Return why a model's KV heads do not fit its ranks, or None if they do.

    Projections that the plan gathers, or leaves whole, give every rank all heads. The heads of the
    others are counted in the weights themselves, because configs go on naming the whole model's.
    """
    ranks = ranks_of(model)
    if ranks is None:
        return None
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in _KEY_PROJECTIONS or _style(model, name) != "colwise":
            continue
        heads = _heads(model, name, module)
        if heads is not None and heads % ranks.size:
            fitting = [str(n) for n in range(2, heads + 1) if heads % n == 0]
            others = f"{' or '.join(fitting)} ranks, on one" if fitting else "one rank"
            return (
                f"{type(model).__name__} has {heads} KV heads, which {ranks.size} ranks cannot "
                f"share evenly ({name} is split by columns); start it on "
                f"{others}, or leave attention whole: in the "
                "tp_plan give the query, key and value projections 'colwise_gather_output' and "
                "the output projection 'rowwise_split_input'"
            )
    return None


def _style(model: Any, name: str) -> str | None:
    plan = getattr(model, "_tp_plan", None) or {}
    return plan.get(name) or plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _heads(model: Any, name: str, module: Any) -> int | None:
    """Return the KV heads of a projection of the whole model; None if nothing tells them."""
    attention = model.get_submodule(name.rpartition(".")[0])
    weight, width = getattr(module, "weight", None), getattr(attention, "head_dim", None)
    if name.endswith("k_proj") and weight is not None and isinstance(width, int):
        # A distributed tensor's shape is that of the whole.
        return int(weight.shape[0]) // width
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
