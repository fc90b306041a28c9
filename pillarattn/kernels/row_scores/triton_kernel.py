"""Scores of every key in every query row, averaged over the group: a second read of the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import padded


@triton.jit
def _row_scores_kernel(
    query,
    keys,
    lengths,
    lse,
    scores,
    stride_qb,
    stride_qh,
    stride_qq,
    stride_kb,
    stride_kh,
    stride_ks,
    kv_heads,
    queries,
    size,
    scale_log2,
    softcap,
    window,
    row_limit,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):
    pair = tl.program_id(0)
    b = (pair // kv_heads).to(tl.int64)
    h = (pair % kv_heads).to(tl.int64)
    position = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    length = tl.load(lengths + b).to(tl.int32)
    own = length - queries + i
    k = tl.load(
        keys
        + b * stride_kb
        + h * stride_kh
        + position[:, None].to(tl.int64) * stride_ks
        + columns[None, :],
        mask=(position < length)[:, None] & (columns < D)[None, :],
        other=0.0,
    )
    visible = (position[None, :] <= own[:, None]) & (i < queries)[:, None]
    if HAS_WINDOW:
        visible = visible & (position[None, :] > own[:, None] - window)
    total = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
    for g in range(G):
        head = h * G + g
        q = tl.load(
            query
            + b * stride_qb
            + head * stride_qh
            + i[:, None].to(tl.int64) * stride_qq
            + columns[None, :],
            mask=(i < queries)[:, None] & (columns < D)[None, :],
            other=0.0,
        )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_CAP:
            raised = tl.exp2(logits * (scale_log2 * 2.0 / softcap))
            logits = softcap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + raised))
        else:
            logits = logits * scale_log2
        end = tl.load(lse + (b * kv_heads * G + head) * queries + i, mask=i < queries, other=0.0)
        counted = visible
        if HAS_LIMIT:
            counted = visible & (i * G + g < row_limit)[:, None]
        share = tl.exp2(logits - end[:, None] * 1.4426950408889634)
        total += tl.where(counted, share, 0.0)
    place = ((b * kv_heads + h) * queries + i) * size
    tl.store(
        scores + place[:, None] + position[None, :],
        total / G,
        mask=(i < queries)[:, None] & (position < size)[None, :],
    )


def row_scores(
    query: Tensor,
    keys: Tensor,
    lse: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    row_limit: int | None,
) -> Tensor:
    """Return row scores `[B, Hkv, Q, S]` fp32, given natural log-sum-exps `[B, Hq, Q]`.

    The arguments are those of `kernels.attention_scores`.
    """
    batch, query_heads, queries, dim = query.shape
    kv_heads, size = keys.shape[1], keys.shape[2]
    shape = (batch, kv_heads, queries, size)
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    if not scores.numel():
        return scores
    block_keys = 16 if query.dtype == torch.float32 else 64
    block_queries = 16 if queries <= 16 or query.dtype == torch.float32 else 32
    grid = (batch * kv_heads, -(-size // block_keys), -(-queries // block_queries))
    with torch.cuda.device_of(query):
        _row_scores_kernel[grid](
            query,
            keys,
            lengths.contiguous(),
            lse,
            scores,
            *query.stride()[:3],
            *keys.stride()[:3],
            kv_heads,
            queries,
            size,
            scale * 1.4426950408889634,
            0.0 if softcap is None else softcap,
            0 if window is None else window,
            0 if row_limit is None else row_limit,
            G=query_heads // kv_heads,
            D=dim,
            BLOCK_Q=block_queries,
            BLOCK_N=block_keys,
            BLOCK_D=padded(dim),
            HAS_CAP=softcap is not None,
            HAS_WINDOW=window is not None,
            HAS_LIMIT=row_limit is not None,
            num_warps=4,
        )
    return scores
