"""KV append in Triton: new rows of keys and values in one launch, placed by the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two

# Tokens that one program copies.
BLOCK_TOKENS = 8


# A position that changes from call to call must not compile the kernel again.
@triton.jit(do_not_specialize=["position"])
def _append_kernel(
    keys,
    values,
    new_keys,
    new_values,
    positions,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_nkb,
    stride_nkh,
    stride_nks,
    stride_nvb,
    stride_nvh,
    stride_nvs,
    kv_heads,
    queries,
    capacity,
    position,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    RAGGED: tl.constexpr,
):
    pair = tl.program_id(0)
    b = (pair // kv_heads).to(tl.int64)
    h = (pair % kv_heads).to(tl.int64)
    token = (tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)
    first = position
    if RAGGED:
        first = tl.load(positions + b).to(tl.int64)
    place = first + token
    # Whatever the positions hold, nothing outside the buffer is written.
    fits = (token < queries) & (place >= 0) & (place < capacity)
    columns = tl.arange(0, BLOCK_D)
    mask = fits[:, None] & (columns < D)[None, :]
    source = new_keys + b * stride_nkb + h * stride_nkh
    row = tl.load(source + token[:, None] * stride_nks + columns[None, :], mask=mask)
    target = keys + b * stride_kb + h * stride_kh
    tl.store(target + place[:, None] * stride_ks + columns[None, :], row, mask=mask)
    columns = tl.arange(0, BLOCK_DV)
    mask = fits[:, None] & (columns < DV)[None, :]
    source = new_values + b * stride_nvb + h * stride_nvh
    row = tl.load(source + token[:, None] * stride_nvs + columns[None, :], mask=mask)
    target = values + b * stride_vb + h * stride_vh
    tl.store(target + place[:, None] * stride_vs + columns[None, :], row, mask=mask)


def kv_append(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, *, positions: int | Tensor
) -> None:
    """Compute `kernels.kv_append`; the last dimension of every tensor is contiguous."""
    batch, kv_heads, queries, dim = new_keys.shape
    value_dim = new_values.shape[3]
    if not batch * kv_heads * queries:
        return
    ragged = isinstance(positions, Tensor)
    block = min(BLOCK_TOKENS, power_of_two(queries))
    with torch.cuda.device_of(keys):
        _append_kernel[(batch * kv_heads, -(-queries // block))](
            keys,
            values,
            new_keys.detach(),
            new_values.detach(),
            positions.contiguous() if isinstance(positions, Tensor) else None,
            *keys.stride()[:3],
            *values.stride()[:3],
            *new_keys.stride()[:3],
            *new_values.stride()[:3],
            kv_heads,
            queries,
            keys.shape[2],
            0 if isinstance(positions, Tensor) else positions,
            D=dim,
            DV=value_dim,
            BLOCK_D=power_of_two(dim),
            BLOCK_DV=power_of_two(value_dim),
            BLOCK_Q=block,
            RAGGED=ragged,
            num_warps=1 if block == 1 else 4,
        )
