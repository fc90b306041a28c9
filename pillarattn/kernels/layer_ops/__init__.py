"""Small ops of a Llama or Qwen layer, each one launch: add and norm, rotary and write, gate."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import (
    check_floating,
    check_integers,
    check_one_device,
    check_shape,
    check_values,
)
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.layer_ops import reference

__all__ = ["add_rms_norm", "rotary_write", "silu_mul"]

for _op in ("add_rms_norm", "rotary_write", "silu_mul"):
    register(_op, "reference", getattr(reference, _op))
    register(_op, "triton", f"pillarattn.kernels.layer_ops.triton_kernel:{_op}")

# A program holds a row: more numbers than this do not fit its registers.
WIDEST = 16384


def add_rms_norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum (RMSNorm).

    Args:
        hidden: `[T, H]`, fp16, bf16, fp32 or fp64.
        residual: `[T, H]`, or None at the first layer, where `hidden` is the stream itself.
        weight: `[H]`.
        eps: added to the mean of squares.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `sum / sqrt(mean(sum**2) + eps) * weight` and the sum, `[T, H]` each. The sum is rounded to
        the dtype before it is normalised, in fp32 (fp64 for fp64).

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_shape("hidden", hidden, (None, None), "[T, H]")
    check_shape("weight", weight, (hidden.shape[1],), "[H]")
    check_floating(hidden=hidden, weight=weight)
    if residual is not None:
        check_shape("residual", residual, tuple(hidden.shape), "[T, H]")
        check_floating(hidden=hidden, residual=residual)
    check_one_device(hidden=hidden, residual=residual, weight=weight)
    compute = choose(
        "add_rms_norm", implementation, hidden, weight,
        unsupported=_limits(hidden.shape[1], hidden=hidden, residual=residual, weight=weight),
    )  # fmt: skip
    found: tuple[Tensor, Tensor] = compute(hidden, residual, weight, eps=eps)
    return found


def silu_mul(gate_up: Tensor, *, implementation: str = "auto") -> Tensor:
    """Return `silu(gate) * up` of `gate_up` `[T, 2 I]`, gate first; `[T, I]`.

    Computed in fp32 (fp64 for fp64) and rounded once.

    Raises:
        ValueError: the shape is wrong.
    """
    check_shape("gate_up", gate_up, (None, None), "[T, 2 I]")
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up holds a gate and as much again, got {gate_up.shape[1]} columns")
    compute = choose("silu_mul", implementation, gate_up, unsupported=_limits(0, gate_up=gate_up))
    out: Tensor = compute(gate_up)
    return out


def rotary_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    slots: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    eps: float = 1e-6,
    implementation: str = "auto",
) -> Tensor:
    """Normalise and rotate queries and keys, and write keys and values to the pool.

    Args:
        qkv: `[T, (Hq + 2 Hkv) D]`, queries, then keys, then values.
        cos, sin: `[T, D]`, of each row's position, the two halves alike (rotary embedding that
            pairs dimension i with i + D / 2).
        slots: `[T]`, where each row's key and value go; a negative one writes nothing.
        key_pool, value_pool: `[slots, Hkv, D]`, written.
        query_weight, key_weight: `[D]` of the RMSNorm of each head (Qwen3); None is no norm.
        eps: of that norm.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        The queries `[T, Hq, D]`, computed in fp32 (fp64 for fp64) and rounded once, as the keys.

    Raises:
        ValueError: a shape, dtype, device or (on the CPU) slot is wrong.
    """
    check_shape("key_pool", key_pool, (None, None, None), "[slots, Hkv, D]")
    check_shape("value_pool", value_pool, tuple(key_pool.shape), "[slots, Hkv, D]")
    size, kv_heads, dim = key_pool.shape
    check_shape("qkv", qkv, (None, None), "[T, (Hq + 2 Hkv) D]")
    rows, width = qkv.shape
    if dim % 2 or width % dim or width // dim <= 2 * kv_heads:
        raise ValueError(
            f"qkv must hold Hq + 2 * {kv_heads} heads of an even D = {dim}, got {width} columns"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (rows, dim), "[T, D]")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        if weight is not None:
            check_shape(name, weight, (dim,), "[D]")
    check_floating(qkv=qkv, key_pool=key_pool, value_pool=value_pool)
    check_integers("slots", slots, (rows,), "[T]")
    check_one_device(
        qkv=qkv, cos=cos, sin=sin, slots=slots, key_pool=key_pool, value_pool=value_pool,
        query_weight=query_weight, key_weight=key_weight,
    )  # fmt: skip
    check_values("slots", slots, minimum=torch.iinfo(torch.int32).min, maximum=size - 1)
    unsupported = _limits(
        0, qkv=qkv, cos=cos, sin=sin, key_pool=key_pool, value_pool=value_pool,
        query_weight=query_weight, key_weight=key_weight,
    )  # fmt: skip
    compute = choose("rotary_write", implementation, qkv, cos, unsupported=unsupported)
    query: Tensor = compute(
        qkv, cos, sin, slots=slots, key_pool=key_pool, value_pool=value_pool,
        query_weight=query_weight, key_weight=key_weight, eps=eps,
    )  # fmt: skip
    return query


def _limits(width: int, **tensors: Tensor | None) -> str | None:
    """Return what the Triton kernels do not take, or None."""
    if width > WIDEST:
        return f"rows of {width} numbers (it takes up to {WIDEST})"
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"{name} of {tensor.dtype} (it takes fp16, bf16 and fp32)"
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"{name} whose last dimension is strided by {tensor.stride(-1)} (it takes 1)"
    return None
