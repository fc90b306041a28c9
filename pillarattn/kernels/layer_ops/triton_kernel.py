"""The small ops of a layer in Triton: one program a row, or some of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two

GATE_COLUMNS = 1024
# Heads of a program: with one alone, starting programs takes longer than what they do.
ROTARY_HEADS = 8


@triton.jit
def _norm_kernel(
    hidden, residual, weight, out, total, stride_h, stride_r, width, eps,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(hidden + row * stride_h + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual + row * stride_r + columns, mask=inside, other=0.0).to(tl.float32)
        # The stream holds the rounded sum: that is what the next layers see, and the norm too.
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    power = tl.sum(x * x, 0) / width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(power + eps) * scale
    tl.store(out + row * width + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_kernel(
    qkv, cos, sin, slots, key_pool, value_pool, query_weight, key_weight, out,
    stride_t, stride_c, stride_s, stride_ks, stride_kh, stride_vs, stride_vh,
    query_heads, kv_heads, eps,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: queries are returned, keys and values go to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    is_query = head < query_heads
    is_key = (head >= query_heads) & (head < query_heads + kv_heads)
    is_value = (head >= query_heads + kv_heads) & (head < query_heads + 2 * kv_heads)
    inside = columns < D // 2
    place = qkv + row * stride_t + head * D + columns
    mine = inside & (is_query | is_key | is_value)
    first = tl.load(place, mask=mine, other=0.0)
    second = tl.load(place + D // 2, mask=mine, other=0.0)
    slot = tl.load(slots + row).to(tl.int64)
    turn = cos + row * stride_c + columns
    lift = sin + row * stride_s + columns
    cos_x = tl.load(turn, mask=inside, other=0.0).to(tl.float32)
    cos_y = tl.load(turn + D // 2, mask=inside, other=0.0).to(tl.float32)
    sin_x = tl.load(lift, mask=inside, other=0.0).to(tl.float32)
    sin_y = tl.load(lift + D // 2, mask=inside, other=0.0).to(tl.float32)
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if HAS_QUERY_NORM or HAS_KEY_NORM:
        power = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D
        shrink = tl.rsqrt(power + eps)[:, None]
        if HAS_QUERY_NORM:
            a = tl.load(query_weight + columns, mask=inside, other=1.0).to(tl.float32)
            b = tl.load(query_weight + D // 2 + columns, mask=inside, other=1.0).to(tl.float32)
            x = tl.where(is_query, x * shrink * a, x)
            y = tl.where(is_query, y * shrink * b, y)
        if HAS_KEY_NORM:
            a = tl.load(key_weight + columns, mask=inside, other=1.0).to(tl.float32)
            b = tl.load(key_weight + D // 2 + columns, mask=inside, other=1.0).to(tl.float32)
            x = tl.where(is_key, x * shrink * a, x)
            y = tl.where(is_key, y * shrink * b, y)
    left = x * cos_x - y * sin_x
    right = y * cos_y + x * sin_y
    target = out + (row * query_heads + head) * D + columns
    tl.store(target, left.to(out.dtype.element_ty), mask=inside & is_query)
    tl.store(target + D // 2, right.to(out.dtype.element_ty), mask=inside & is_query)
    kept = inside & (slot >= 0)
    target = key_pool + slot * stride_ks + (head - query_heads) * stride_kh + columns
    tl.store(target, left.to(key_pool.dtype.element_ty), mask=kept & is_key)
    tl.store(target + D // 2, right.to(key_pool.dtype.element_ty), mask=kept & is_key)
    own = head - query_heads - kv_heads
    target = value_pool + slot * stride_vs + own * stride_vh + columns
    tl.store(target, first.to(value_pool.dtype.element_ty), mask=kept & is_value)
    tl.store(target + D // 2, second.to(value_pool.dtype.element_ty), mask=kept & is_value)


def add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.add_rms_norm`."""
    rows, width = hidden.shape
    out = torch.empty(rows, width, dtype=hidden.dtype, device=hidden.device)
    total = hidden if residual is None else torch.empty_like(out)
    if out.numel():
        with torch.cuda.device_of(hidden):
            _norm_kernel[(rows,)](
                hidden, residual, weight, out, total, hidden.stride(0),
                0 if residual is None else residual.stride(0), width, eps,
                BLOCK=power_of_two(width), HAS_RESIDUAL=residual is not None,
                num_warps=4 if width <= 4096 else 8,
            )  # fmt: skip
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute `kernels.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        with torch.cuda.device_of(gate_up):
            _gate_kernel[(rows, -(-width // GATE_COLUMNS))](
                gate_up, out, gate_up.stride(0), width, BLOCK=GATE_COLUMNS, num_warps=4
            )
    return out


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
    rows, (kv_heads, dim) = qkv.shape[0], key_pool.shape[1:]
    heads = qkv.shape[1] // dim
    query_heads = heads - 2 * kv_heads
    out = torch.empty(rows, query_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if rows:
        with torch.cuda.device_of(qkv):
            _rotary_kernel[(rows, -(-heads // ROTARY_HEADS))](
                qkv, cos, sin, slots.contiguous(), key_pool, value_pool, query_weight, key_weight,
                out, qkv.stride(0), cos.stride(0), sin.stride(0), *key_pool.stride()[:2],
                *value_pool.stride()[:2], query_heads, kv_heads, eps,
                D=dim, HALF=power_of_two(dim // 2), HEADS=ROTARY_HEADS,
                HAS_QUERY_NORM=query_weight is not None, HAS_KEY_NORM=key_weight is not None,
                num_warps=ROTARY_HEADS // 2,
            )  # fmt: skip
    return out
