"""The small ops of a layer in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.softmax import accumulation_dtype


def add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.add_rms_norm`."""
    total = hidden if residual is None else hidden + residual
    return _normed(total.to(accumulation_dtype(hidden.dtype)), weight, eps).to(hidden.dtype), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute `kernels.silu_mul`."""
    gate, up = gate_up.to(accumulation_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotary_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    slots: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute `kernels.rotary_write`."""
    kv_heads, dim = key_pool.shape[1:]
    heads = qkv.unflatten(1, (-1, dim))
    turned = heads[:, :-kv_heads].to(accumulation_dtype(qkv.dtype))
    query, key = turned[:, :-kv_heads], turned[:, -kv_heads:]
    query = query if query_weight is None else _normed(query, query_weight, eps)
    key = key if key_weight is None else _normed(key, key_weight, eps)
    written = slots >= 0
    places = slots[written].long()
    key_pool[places] = _rotated(key, cos, sin)[written].to(key_pool.dtype)
    value_pool[places] = heads[written, -kv_heads:]
    return _rotated(query, cos, sin).to(qkv.dtype)


def _normed(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (
        rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps) * weight.to(rows.dtype)
    )


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[T, heads, D]` by `cos` and `sin` `[T, D]`."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = (table.to(heads.dtype).unsqueeze(1) for table in (cos, sin))
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
