"""Launches of mixed attention: the work list, room for splits, and the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.block_sizes import padded
from pillarattn.kernels.combine_splits.triton_kernel import combine_listed_kernel
from pillarattn.kernels.mixed_attention.known import KnownScores
from pillarattn.kernels.mixed_attention.tiles import (
    MOST_BASED,
    MixedTiles,
    default_tiles,
    programs_of,
)
from pillarattn.kernels.mixed_attention.triton_kernel import mixed_kernel
from pillarattn.kernels.mixed_attention.work_list import (
    WorkList,
    make_work_list,
    most_splits,
    slots_of,
)

LOG2E = 1.4426950408889634
# fp16 has no room for weights relative to something else than their largest.
BASED = {torch.bfloat16, torch.float32}
# Splits per step of their sum. Fixed, so that more splits (all empty) never change an order.
BLOCK_SPLITS = 8


def mixed_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    *,
    row_starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    block_size: int,
    indices: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    lse: Tensor | None = None,
    known: KnownScores | None = None,
    tiles: MixedTiles | None = None,
    work: WorkList | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute `kernels.mixed_attention`; nothing is read on the host, so a CUDA graph may hold it.

    Args:
        tiles: None takes those of the work list, or the defaults for the shapes.
        others: as `kernels.mixed_attention`.
    """
    rows, heads, dim = query.shape
    kv_heads, value_dim = value_pool.shape[1:]
    group = heads // kv_heads
    out = query.new_empty(rows, heads, value_dim)
    if not out.numel() or not len(lengths):
        return out
    tiles = tiles if work is None else work.tiles
    tiles = tiles or default_tiles(
        query, key_pool, value_pool, requests=len(lengths),
        most_rows=None if known is None else known.pooled_rows,
    )  # fmt: skip
    counts, row_starts, lengths, tail_start = (
        t.contiguous() for t in (counts, row_starts, lengths, tail_start)
    )
    most = most_splits(block_table, block_size, tiles)
    if work is None:
        work = make_work_list(
            rows, row_starts=row_starts, lengths=lengths, counts=counts, tail_start=tail_start,
            group=group, tiles=tiles, most=most,
        )  # fmt: skip
    slots = slots_of(indices, block_table, block_size) if slots is None else slots
    part = torch.empty(most, rows, heads, value_dim, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(most, rows, heads, dtype=torch.float32, device=query.device)
    indices, slots, block_table = map(_in_lines, (indices, slots, block_table))
    tensors, sizes = _taken(known)
    options = {
        "G": group, "HEADS": heads, "DV": value_dim, "BLOCK_DV": padded(value_dim),
        "HAS_SINKS": sinks is not None, "HAS_LSE": lse is not None, "HAS_KEPT": known is not None,
    }  # fmt: skip
    with torch.cuda.device_of(query):
        mixed_kernel[(programs_of(tiles, query.device),)](
            query, key_pool, value_pool, row_starts, lengths, block_table, indices, slots, counts,
            tail_start, sinks, work.items, work.starts, work.splits, out, part, part_lse, lse,
            *tensors,
            *query.stride()[:2], *key_pool.stride()[:2], *value_pool.stride()[:2],
            block_table.stride(0), *indices.stride()[:2], *slots.stride()[:2], *out.stride()[:2],
            *sizes, len(lengths) * kv_heads, kv_heads, rows,
            scale * LOG2E, 0.0 if softcap is None else softcap,
            0 if window is None else window, tiles.split,
            D=dim, BLOCK=block_size, BLOCK_D=padded(dim), HAS_CAP=softcap is not None,
            HAS_WINDOW=window is not None, HAS_FIRST=tensors[-1] is not None,
            num_warps=tiles.warps, num_stages=tiles.stages, **options,
            **_block_sizes(tiles, group, known, query.dtype),
        )  # fmt: skip
        if most > 1:
            combine_listed_kernel[(rows, heads)](
                part, part_lse, work.owners, work.splits, sinks, out, lse, *tensors[:2],
                *out.stride()[:2], rows, kv_heads, sizes[-1], BLOCK_SPLITS=BLOCK_SPLITS,
                num_warps=2, **options,
            )  # fmt: skip
    return out


def _block_sizes(
    tiles: MixedTiles, group: int, known: KnownScores | None, dtype: torch.dtype
) -> dict[str, int | bool]:
    """Return what the kernel takes of the tiles: blocks of its loops, and which loops there are.

    Raises:
        ValueError: rows are to be pooled, and no block holds those of a request.
    """
    taken, pooled_rows = tiles.taken_rows(group), None if known is None else known.pooled_rows
    if pooled_rows is not None and taken < pooled_rows * group:
        raise ValueError(
            f"the work list was made for blocks of {tiles.block_rows} packed rows, and pooling "
            f"takes {pooled_rows * group}; give work_list(most_rows={pooled_rows})"
        )
    is_based = known is not None and dtype in BASED and tiles.block_rows <= MOST_BASED
    scored = tiles.scored_keys or tiles.block_keys, tiles.scored_stages or tiles.stages
    # What the known normalisers do not serve is rare: in small parts, where that needs registers.
    rare = (*tiles.rare_rows(group), 16, 1) if is_based else (tiles.block_rows, taken, *scored)
    return {
        "FEW_M": tiles.few_rows, "BLOCK_M": tiles.block_rows, "TAKEN_M": taken,
        "BLOCK_N": tiles.block_keys, "STAGES": tiles.stages, "BLOCK_I": padded(taken // group),
        "SCORED_N": scored[0], "SCORED_STAGES": scored[1], "RARE_M": rare[0],
        "RARE_TAKEN": rare[1], "RARE_N": rare[2], "RARE_STAGES": rare[3],
        "RARE_I": padded(rare[1] // group), "IS_BASED": is_based,
        "IS_POOLED": pooled_rows is not None,
    }  # fmt: skip


def _in_lines(integers: Tensor) -> Tensor:
    """Return a tensor that is contiguous along its last dimension."""
    is_so = integers.stride(-1) == 1 or integers.shape[-1] < 2
    return integers if is_so else integers.contiguous()


def _taken(known: KnownScores | None) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Return what the kernel takes of known normalisers: tensors, then strides and sizes."""
    if known is None:
        return (None,) * 5, (0,) * 6
    scores = known.scores
    tensors = (
        known.kept_lse, known.kept_place.contiguous(), scores, known.score_place.contiguous(),
        known.first_place,
    )  # fmt: skip
    return tensors, (*scores.stride()[:3], *scores.shape[2:], known.kept_lse.shape[1])
