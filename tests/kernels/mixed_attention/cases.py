"""Batches that mix drafts, verify rows and prompt chunks over a paged pool, and their truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")


@dataclass(frozen=True)
class Part:
    """One request: tokens, rows of the pass, and how many keys its draft keeps (None: all)."""

    length: int
    rows: int = 1
    keep: int | None = None


def make(
    parts: list[Part],
    *,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 16,
    value_dim: int = 16,
    block: int = 16,
    tail: int = 4,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    spare_rows: int = 0,
) -> dict[str, Any]:
    """Return the op's arguments; what nothing may read is NaN or far out of range.

    Blocks of the pool are handed out in a random order. Heads keep different numbers of keys.
    """
    gen = torch.Generator().manual_seed(seed)
    rows = sum(part.rows for part in parts)
    needed = [-(-part.length // block) for part in parts]
    free = torch.randperm(sum(needed) + 3, generator=gen)
    slots = len(free) * block
    table = torch.full((len(parts), max(needed, default=0) + 1), 2**30, dtype=torch.int32)
    pools = {
        name: torch.full((slots, kv_heads, width), NAN)
        for name, width in (("key_pool", dim), ("value_pool", value_dim))
    }
    widest = max((part.keep or 0 for part in parts), default=0)
    indices = torch.full((len(parts), kv_heads, widest), 2**30, dtype=torch.int32)
    counts = torch.full((len(parts), kv_heads), -1, dtype=torch.int32)
    tails = torch.zeros(len(parts), dtype=torch.int64)
    taken = 0
    for b, (part, blocks) in enumerate(zip(parts, needed, strict=True)):
        table[b, :blocks] = free[taken : taken + blocks].int()
        taken += blocks
        position = torch.arange(part.length)
        own = table[b].long()[position // block] * block + position % block
        for pool in pools.values():
            pool[own] = torch.randn(part.length, kv_heads, pool.shape[2], generator=gen)
        if part.keep is None:
            # Nobody looks at the tail of what reads everything.
            tails[b] = part.length
            continue
        tails[b] = max(0, part.length - tail - b)
        for h in range(kv_heads):
            count = min(part.keep, int(tails[b])) // (1 + 2 * h)
            chosen = torch.randperm(int(tails[b]), generator=gen)[:count]
            indices[b, h, :count] = chosen.sort().values.int()
            counts[b, h] = count
    starts = torch.tensor([0, *(part.rows for part in parts)]).cumsum(0)
    query = torch.randn(rows + spare_rows, kv_heads * group, dim, generator=gen)
    found = {
        "query": query.to(dtype), **{name: pool.to(dtype) for name, pool in pools.items()},
        "row_starts": starts, "lengths": torch.tensor([part.length for part in parts]),
        "block_table": table, "indices": indices, "counts": counts, "tail_start": tails,
    }  # fmt: skip
    return {n: t.to(device) for n, t in found.items()} | {"block_size": block}


def truth(
    case: dict[str, Any],
    dtype: torch.dtype,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[rows, Hq, Dv]` and log-sum-exps in `dtype`, one row and head at a time."""
    block, heads = case["block_size"], case["query"].shape[1]
    kv_heads = case["key_pool"].shape[1]
    scale = case["query"].shape[2] ** -0.5 if scale is None else scale
    outs, ends = [], []
    for b, length in enumerate(case["lengths"].tolist()):
        first, end = case["row_starts"][b : b + 2].tolist()
        for row in range(first, end):
            own = length - (end - row)
            for head in range(heads):
                h = head // (heads // kv_heads)
                count, tail = int(case["counts"][b, h]), int(case["tail_start"][b])
                seen = range(own + 1)
                if count >= 0:
                    chosen = case["indices"][b, h, :count].tolist()
                    seen = [*chosen, *range(tail, length)]
                if window is not None:
                    seen = [p for p in seen if p > own - window]
                places = torch.tensor([*seen], dtype=torch.int64, device=case["query"].device)
                slots = case["block_table"][b].long()[places // block] * block + places % block
                logits = case["key_pool"][slots, h].to(dtype) @ case["query"][row, head].to(dtype)
                logits = logits * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                ended = logits
                if sinks is not None and len(places):
                    ended = torch.cat([logits, sinks[head : head + 1].to(dtype)])
                mass = torch.softmax(ended, 0)[: len(places)]
                outs.append(mass @ case["value_pool"][slots, h].to(dtype))
                ends.append(ended.logsumexp(0))
    shape = (int(case["row_starts"][-1]), heads)
    return torch.stack(outs).view(*shape, -1), torch.stack(ends).view(shape)
