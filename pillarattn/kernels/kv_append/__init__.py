"""KV append: write new keys and values into preallocated buffers, in place."""

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
from pillarattn.kernels.kv_append import reference

register("kv_append", "reference", reference.kv_append)
register("kv_append", "triton", "pillarattn.kernels.kv_append.triton_kernel:kv_append")


def kv_append(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    positions: int | Tensor,
    implementation: str = "auto",
) -> None:
    """Write Q new tokens of each row into `keys` and `values`, which are mutated and never moved.

    Args:
        keys: `[B, Hkv, C, D]` buffer with room for C tokens a row.
        values: `[B, Hkv, C, Dv]` buffer.
        new_keys: `[B, Hkv, Q, D]` in the buffers' dtype.
        new_values: `[B, Hkv, Q, Dv]`.
        positions: where the first new token of each row goes: one int for all rows, or `[B]`.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Raises:
        ValueError: a shape, dtype or device is wrong, or the tokens do not fit. A CUDA tensor of
            positions is not read, so that its caller answers for the capacity; Triton leaves out
            the tokens that do not fit.
    """
    if not _agree(keys, values, new_keys, new_values):
        _check(keys, values, new_keys, new_values)
    (batch, _, capacity, _), queries = keys.shape, new_keys.shape[2]
    if isinstance(positions, Tensor):
        check_integers("positions", positions, (batch,), "[B]")
        check_one_device(keys=keys, positions=positions)
        room = f"positions of {queries} new tokens in a buffer of {capacity}"
        check_values(room, positions, minimum=0, maximum=capacity - queries)
    elif not 0 <= positions <= capacity - queries:
        raise ValueError(
            f"{queries} new tokens at position {positions} do not fit a buffer of {capacity}; "
            "allocate a larger cache"
        )
    unsupported = None
    for tensor in (keys, values, new_keys, new_values):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            unsupported = f"tensors whose last dimension is strided by {tensor.stride(3)}"
    with torch.no_grad():
        compute = choose(
            "kv_append", implementation, keys, values, new_keys, new_values, unsupported=unsupported
        )
        compute(keys, values, new_keys, new_values, positions=positions)


def _agree(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> bool:
    """Whether the four are as they should be: every layer of every eager pass asks."""
    held, new, dtype, device = keys.shape, new_keys.shape, keys.dtype, keys.device
    return (
        len(held) == len(new) == len(values.shape) == 4
        and values.shape[:3] == held[:3]
        and new_values.shape[:3] == new[:3]
        and new[:2] == held[:2]
        and new[3] == held[3]
        and new_values.shape[3:] == values.shape[3:]
        and keys.is_floating_point()
        and all(t.dtype == dtype and t.device == device for t in (values, new_keys, new_values))
    )


def _check(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Raise `ValueError`, which says what of the four does not fit."""
    check_shape("keys", keys, (None,) * 4, "[B, Hkv, C, D]")
    check_shape("values", values, (*keys.shape[:3], None), "[B, Hkv, C, Dv]")
    batch, kv_heads, _, dim = keys.shape
    check_shape("new_keys", new_keys, (batch, kv_heads, None, dim), "[B, Hkv, Q, D]")
    wanted = (batch, kv_heads, new_keys.shape[2], values.shape[3])
    check_shape("new_values", new_values, wanted, "[B, Hkv, Q, Dv]")
    check_floating(keys=keys, values=values, new_keys=new_keys, new_values=new_values)
    check_one_device(keys=keys, values=values, new_keys=new_keys, new_values=new_values)
