"""Scores of every key in every query row, averaged over the group: a second read of the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import padded, power_of_two

# Programs that a launch over pages has at least, where there are keys enough: four for each
# multiprocessor of a Hopper GPU.
LEAST_PROGRAMS = 528


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


@dataclass(frozen=True)
class ScoreTiles:
    """Sizes of one launch over pages.

    Attributes:
        keys: of a step.
        most: steps of a program at most.
        warps, stages: per program, and depth of the load pipeline.
    """

    keys: int = 128
    most: int = 16
    warps: int = 4
    stages: int = 3

    def stretch(self, size: int, lines: int) -> int:
        """Return the keys of a program, if `lines` of them begin at each of `size` keys."""
        wanted = power_of_two(-(-size * lines // LEAST_PROGRAMS))
        return min(max(self.keys, wanted), self.keys * self.most)


@triton.jit
def paged_row_scores_kernel(
    query, key_pool, lse, out, scored, first_place, row_starts, lengths, block_table,
    stride_qt, stride_qh, stride_ks, stride_kh, stride_tb, stride_ov, stride_oh, stride_oq,
    kv_heads, queries, size, scale_log2, softcap, window, stretch,
    G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Score one stretch of a request's keys for one KV head, if the request is there."""
    v = (tl.program_id(0) // kv_heads).to(tl.int64)
    h = (tl.program_id(0) % kv_heads).to(tl.int64)
    b = tl.load(scored + v).to(tl.int64)
    known = b >= 0
    first_row = tl.load(row_starts + b, mask=known, other=0).to(tl.int32)
    rows = tl.load(row_starts + b + 1, mask=known, other=0).to(tl.int32) - first_row
    length = tl.load(lengths + b, mask=known, other=0).to(tl.int32)
    first_query = tl.program_id(2) * BLOCK_Q
    first = tl.program_id(1) * stretch
    last = tl.where(first_query < rows, tl.minimum(first + stretch, length), first)
    i = first_query + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    steps = tl.arange(0, BLOCK_N)
    own = length - rows + i
    row = (first_row + i).to(tl.int64)
    if HAS_FIRST:
        v += tl.load(first_place).to(tl.int64)
    place = v * stride_ov + h * stride_oh + i.to(tl.int64) * stride_oq
    written = (i < rows) & (i < queries)
    table = block_table + b * stride_tb
    # Looked up one step ahead: keys that wait for a chain of loads are not queued.
    entry = tl.load(table + (first + steps) // BLOCK, mask=first + steps < last, other=0)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        position = start + steps
        inside = position < last
        slot = entry.to(tl.int64) * BLOCK + position % BLOCK
        ahead = position + BLOCK_N
        entry = tl.load(table + ahead // BLOCK, mask=ahead < last, other=0)
        k = tl.load(
            key_pool + slot[:, None] * stride_ks + h * stride_kh + columns[None, :],
            mask=inside[:, None] & (columns < D)[None, :],
            other=0.0,
        )
        visible = (position[None, :] <= own[:, None]) & (i < rows)[:, None]
        if HAS_WINDOW:
            visible = visible & (position[None, :] > own[:, None] - window)
        total = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
        for g in tl.static_range(G):
            head = h * G + g
            q = tl.load(
                query + row[:, None] * stride_qt + head * stride_qh + columns[None, :],
                mask=(i < rows)[:, None] & (columns < D)[None, :],
                other=0.0,
            )
            logits = tl.dot(q, tl.trans(k), input_precision="ieee")
            if HAS_CAP:
                raised = tl.exp2(logits * (scale_log2 * 2.0 / softcap))
                logits = softcap * 1.4426950408889634 * (1.0 - 2.0 / (1.0 + raised))
            else:
                logits = logits * scale_log2
            end = tl.load(lse + row * (kv_heads * G) + head, mask=i < rows, other=0.0)
            share = tl.exp2(logits - end[:, None] * 1.4426950408889634)
            total += tl.where(visible, share, 0.0)
        tl.store(
            out + place[:, None] + position[None, :],
            total / G,
            mask=written[:, None] & (inside & (position < size))[None, :],
        )


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
    tiles: ScoreTiles | None = None,
) -> None:
    """Compute `kernels.paged_row_scores`; nothing is read on the host."""
    _, query_heads, dim = query.shape
    places, (_, kv_heads, queries, size) = len(scored), out.shape
    if not places or not out.numel():
        return
    is_plain = query.dtype == torch.float32
    if tiles is None:
        # Wider heads leave room for fewer keys in flight.
        tiles = ScoreTiles(16, 1, 4, 1) if is_plain else ScoreTiles(128 if dim <= 128 else 64)
    block_queries = 16 if queries <= 16 or is_plain else 32
    pairs, blocks = places * kv_heads, -(-queries // block_queries)
    stretch = tiles.stretch(size, pairs * blocks)
    grid = (pairs, -(-size // stretch), blocks)
    with torch.cuda.device_of(query):
        paged_row_scores_kernel[grid](
            query, key_pool, lse, out, scored.contiguous(), first_place, row_starts.contiguous(),
            lengths.contiguous(), block_table,
            *query.stride()[:2], *key_pool.stride()[:2], block_table.stride(0), *out.stride()[:3],
            kv_heads, queries, size, scale * 1.4426950408889634,
            0.0 if softcap is None else softcap, 0 if window is None else window, stretch,
            G=query_heads // kv_heads, D=dim, BLOCK=block_size, BLOCK_Q=block_queries,
            BLOCK_N=tiles.keys, BLOCK_D=padded(dim), STAGES=tiles.stages,
            HAS_CAP=softcap is not None, HAS_WINDOW=window is not None,
            HAS_FIRST=first_place is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
