"""Row scores over a paged pool in plain PyTorch: one request and one KV head after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.softmax import accumulation_dtype


def paged_row_scores(
    query: Tensor,
    key_pool: Tensor,
    lse: Tensor,
    out: Tensor,
    *,
    scored: Tensor,
    row_starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    first_place: Tensor | None = None,
) -> None:
    """Compute `kernels.paged_row_scores`; reads its integers on the host."""
    kv_heads, device = key_pool.shape[1], query.device
    group, dtype = query.shape[1] // kv_heads, accumulation_dtype(query.dtype)
    first_out = 0 if first_place is None else int(first_place)
    for v, b in enumerate(scored.tolist(), first_out):
        if b < 0:
            continue
        first, end = row_starts[b : b + 2].tolist()
        length = int(lengths[b])
        places = torch.arange(length, device=device)
        own = (length - (end - first) + torch.arange(end - first, device=device)).unsqueeze(-1)
        hidden = places > own
        if window is not None:
            hidden = hidden | (places <= own - window)
        slots = block_table[b].long()[places // block_size] * block_size + places % block_size
        for h in range(kv_heads):
            heads = slice(h * group, (h + 1) * group)
            rows = query[first:end, heads].transpose(0, 1).to(dtype) * scale
            logits = rows @ key_pool[slots, h].to(dtype).T
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            ends = lse[first:end, heads].T.unsqueeze(-1).to(dtype)
            share = (logits - ends).exp().masked_fill(hidden, 0.0)
            out[v, h, : end - first, :length] = share.mean(dim=0).to(out.dtype)
