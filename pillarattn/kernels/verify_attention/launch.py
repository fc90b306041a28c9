"""Launches of the verify kernel: checks what fits, allocates, and combines the splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import padded
from pillarattn.kernels.combine_splits.triton_kernel import combine_splits
from pillarattn.kernels.row_scores.triton_kernel import row_scores
from pillarattn.kernels.verify_attention.tiles import VerifyTiles, default_tiles, split_of
from pillarattn.kernels.verify_attention.triton_kernel import verify_kernel

LOG2E = 1.4426950408889634
# Newest keys whose log-sum-exp stands in for an unknown normaliser of pooled scores.
PROBE = 128
# Width of a value block where there are no values: the smallest that the kernel compiles with.
NO_VALUES = 16


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
    pooled: Tensor | None = None,
    normaliser: Tensor | None = None,
    strict: bool = False,
    tiles: VerifyTiles | None = None,
) -> Tensor | None:
    """Run attention; write `lse` `[B, Hq, Q]` and `pooled` `[B, Hkv, S]` where they are given.

    Args:
        values: None leaves the output out; only the log-sum-exps are computed.
        normaliser: `[B, Hq, Q]` fp32 contiguous, natural log-sum-exps that `pooled` divides by.
        others: as `kernels.verify_attention`.

    Raises:
        ValueError: pooled scores of more rows than one block holds.
    """
    batch, query_heads, queries, _ = query.shape
    kv_heads, size = keys.shape[1], keys.shape[2]
    group = query_heads // kv_heads
    value_dim = NO_VALUES if values is None else values.shape[3]
    out = None
    if values is not None:
        shape = (batch, query_heads, queries, value_dim)
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    rows = batch * query_heads * queries
    if not rows:
        return out
    tiles = tiles or default_tiles(
        query, keys, values, group=group, strict=strict, one_block=pooled is not None
    )
    blocks = -(-queries * group // tiles.block_rows)
    if pooled is not None and blocks > 1:
        raise ValueError(
            f"pooled scores come from one block of {tiles.block_rows} rows, got "
            f"{queries} * {group}; use return_scores and pool_rows"
        )
    split = tiles.split or split_of(batch * kv_heads * blocks, max(size, 1), alone=pooled is None)
    splits = max(1, -(-size // split))
    part = part_lse = None
    if splits > 1:
        part_lse = torch.empty(splits, rows, dtype=torch.float32, device=query.device)
        if values is not None:
            part = torch.empty(splits, rows, value_dim, dtype=torch.float32, device=query.device)
    _run_kernel(
        (batch * kv_heads, blocks, splits),
        (query, keys, values, lengths.contiguous(), sinks, normaliser),
        (out, part, lse if part_lse is None else part_lse, pooled),
        scale=scale,
        window=window,
        softcap=softcap,
        split=split,
        tiles=tiles,
        has_lse=lse is not None,
    )
    if part_lse is not None:
        combine_splits(
            part, part_lse, out, heads=query_heads, queries=queries, sinks=sinks, lse=lse
        )
    return out


def _run_kernel(
    grid: tuple[int, int, int],
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None],
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    split: int,
    tiles: VerifyTiles,
    has_lse: bool,
) -> None:
    """Spell out strides and compile-time constants of one launch.

    Args:
        grid: rows times KV heads, blocks of query rows, splits of the keys.
        inputs: query, keys, values, lengths, sinks, normaliser.
        outputs: output, its parts by split, log-sum-exps (by split where there are several), pooled
            scores; None is not written.
        split: keys of one split.
        has_lse: whether the log-sum-exps are wanted by the caller.
        others: as `launch`.
    """
    query, keys, values, lengths, sinks, normaliser = inputs
    out, part, lse, pooled = outputs
    shown = keys if values is None else values
    query_heads, queries, dim = query.shape[1:]
    kv_heads = keys.shape[1]
    value_dim = NO_VALUES if values is None else values.shape[3]
    with torch.cuda.device_of(query):
        verify_kernel[grid](
            query,
            keys,
            shown,
            lengths,
            sinks,
            normaliser,
            out,
            part,
            lse,
            pooled,
            *query.stride()[:3],
            *keys.stride()[:3],
            *shown.stride()[:3],
            *((0, 0, 0) if out is None else out.stride()[:3]),
            *((0, 0) if pooled is None else pooled.stride()[:2]),
            kv_heads,
            queries,
            scale * LOG2E,
            0.0 if softcap is None else softcap,
            0 if window is None else window,
            split,
            G=query_heads // kv_heads,
            D=dim,
            DV=value_dim,
            BLOCK_M=tiles.block_rows,
            BLOCK_N=tiles.block_keys,
            BLOCK_D=padded(dim),
            BLOCK_DV=padded(value_dim),
            STAGES=tiles.stages,
            BRANCH=tiles.branch,
            DIRECT=grid[2] == 1,
            POOLED=pooled is not None,
            HAS_VALUES=values is not None,
            HAS_SINKS=sinks is not None,
            HAS_CAP=softcap is not None,
            HAS_WINDOW=window is not None,
            HAS_LSE=has_lse,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


def verify_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    return_scores: bool,
    row_limit: int | None,
    strict: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `kernels.verify_attention`; scores of single rows read the keys a second time."""
    lse = _lse_of(query) if return_scores else None
    options: dict[str, Any] = {
        "lengths": lengths,
        "scale": scale,
        "window": window,
        "softcap": softcap,
    }
    out = launch(query, keys, values, sinks=sinks, lse=lse, strict=strict, **options)
    assert out is not None
    if lse is None:
        return out, None
    return out, row_scores(query, keys, lse, row_limit=row_limit, **options)


def attention_scores(
    query: Tensor,
    keys: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    row_limit: int | None,
) -> Tensor:
    """Compute `kernels.attention_scores`: one pass for the log-sum-exps, one for the scores."""
    lse = _lse_of(query)
    options: dict[str, Any] = {
        "lengths": lengths,
        "scale": scale,
        "window": window,
        "softcap": softcap,
    }
    launch(query, keys, None, sinks=sinks, lse=lse, **options)
    return row_scores(query, keys, lse, row_limit=row_limit, **options)


def pooled_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    normaliser: Tensor | None,
    tiles: VerifyTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `kernels.pooled_attention` in one pass over keys and values."""
    batch, kv_heads, size = keys.shape[:3]
    options: dict[str, Any] = {"lengths": lengths, "scale": scale, "softcap": softcap}
    if normaliser is None:
        normaliser = _lse_of(query)
        near = PROBE if window is None else min(PROBE, window)
        group = query.shape[1] // kv_heads
        probe = default_tiles(query, keys, None, group=group, strict=False)
        # A window leaves few keys to read: splits would be empty.
        probe = replace(probe, split=max(size, 1))
        launch(query, keys, None, window=near, sinks=sinks, lse=normaliser, tiles=probe, **options)
    lse = _lse_of(query)
    pooled = torch.empty(batch, kv_heads, size, dtype=torch.float32, device=query.device)
    out = launch(
        query,
        keys,
        values,
        window=window,
        sinks=sinks,
        lse=lse,
        pooled=pooled,
        normaliser=normaliser.contiguous(),
        tiles=tiles,
        **options,
    )
    assert out is not None
    return out, pooled, lse


def _lse_of(query: Tensor) -> Tensor:
    return torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
