"""Mixed attention: rows that draft and rows that verify, of many requests, over one paged pool."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import (
    check_at_least,
    check_floating,
    check_integers,
    check_one_device,
    check_shape,
    check_values,
    triton_attention_limits,
)
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.mixed_attention import reference
from pillarattn.kernels.mixed_attention.known import (
    KnownScores,
    can_pool,
    check_known,
    score_limits,
)
from pillarattn.kernels.mixed_attention.tiles import default_tiles, strict_tiles
from pillarattn.kernels.mixed_attention.work_list import (
    WorkList,
    make_work_list,
    most_splits,
    slots_of,
)

__all__ = [
    "READS_ALL", "KnownScores", "WorkList", "can_pool", "mixed_attention", "slots_of", "work_list",
]  # fmt: skip

# The count of a request that reads every position.
READS_ALL = -1

register("mixed_attention", "reference", reference.mixed_attention)
register("mixed_attention", "triton", "pillarattn.kernels.mixed_attention.launch:mixed_attention")


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
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    known: KnownScores | None = None,
    work: WorkList | None = None,
    slots: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attend from the newest rows of each request, to all of its keys or to few.

    Request b owns the packed rows `row_starts[b]` up to `row_starts[b + 1] - 1`; the last one sits
    at position `lengths[b] - 1`. It verifies (or reads its prompt) where `counts[b]` is -1: each
    row sees all positions up to its own. Else it drafts: its single row reads
    `indices[b, h, :counts[b, h]]` and the positions from `tail_start[b]` on. Position p of request
    b lies in slot `block_table[b, p // block_size] * block_size + p % block_size` of the pool.

    Args:
        query: `[T, Hq, D]`, fp16, bf16, fp32 or fp64, with T >= `row_starts[B]`.
        key_pool: `[slots, Hkv, D]`; what no request has written is undefined.
        value_pool: `[slots, Hkv, Dv]`, likewise.
        row_starts: `[B + 1]`, ascending from 0. A request may have no row.
        lengths: `[B]`, tokens of each request, its rows of this pass included.
        block_table: `[B, P]`, the pool's block of each of a request's blocks; entries past its
            length are never read.
        block_size: tokens of a block, a power of two.
        indices: `[B, Hkv, N]` int32 logical positions, ascending, all < `tail_start`.
        counts: `[B, Hkv]` int32; -1 for all KV heads of a request or for none.
        tail_start: `[B]`, first position that a draft reads without its being selected.
        scale: factor on the logits; None is D ** -0.5.
        window: see only positions > own position - window; None is no window.
        softcap: logits become softcap * tanh(logits / softcap); None is no cap.
        sinks: `[Hq]` or None, logits that take a share of the softmax and have no value.
        lse: `[T, Hq]` fp32 or None: written, the natural log-sum-exp of each row's logits and
            sink, -inf where it sees nothing.
        known: what row scores out of the same read go by, and where they go; None: nowhere.
        work: `work_list` of these arguments, if the caller has made it for all layers.
        slots: `slots_of(indices, block_table, block_size)`, likewise.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[T, Hq, Dv]` in the query's dtype, summed in fp32 (fp64 for fp64); the rest is undefined.

    Raises:
        ValueError: a shape, dtype, device, range or (on the CPU) value is wrong.

    Source: arXiv 2512.01278, section 4 (its fused draft and verify attention).
    """
    _check_pool(query, key_pool, value_pool, block_table, block_size, sinks=sinks, lse=lse)
    _check_lists(
        query, key_pool, block_table, row_starts=row_starts, lengths=lengths, indices=indices,
        counts=counts, tail_start=tail_start, most=block_table.shape[1] * block_size,
    )  # fmt: skip
    _check_options(window, softcap)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    unsupported = triton_attention_limits(query, key_pool, value_pool, scale=scale)
    if known is not None:
        check_known(known, query, row_starts, counts)
        unsupported = unsupported or score_limits(query, key_pool, value_pool)
    pools = query, key_pool, value_pool
    compute = choose("mixed_attention", implementation, *pools, unsupported=unsupported)
    out: Tensor = compute(
        *pools, row_starts=row_starts, lengths=lengths, block_table=block_table,
        block_size=block_size, indices=indices, counts=counts, tail_start=tail_start, scale=scale,
        window=window, softcap=softcap, sinks=sinks, lse=lse, known=known, work=work, slots=slots,
    )  # fmt: skip
    return out


def work_list(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    *,
    row_starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    block_size: int,
    counts: Tensor,
    tail_start: Tensor,
    most_rows: int | None = None,
    strict: bool = False,
) -> WorkList:
    """Return the work list of a `mixed_attention` call, which layers of the same shapes share.

    Args:
        counts: as `mixed_attention`; where layers have different ones, the largest of each request
            and KV head, and -1 where any layer has it.
        most_rows: of the largest request, which sizes are made for; None: not known. More are
            right too, and slower.
        strict: give each row that reads everything the bits that it gets alone, whatever is beside
            it, without a window, sinks or known normalisers; Triton only.
        others: as `mixed_attention`.
    """
    tiles = (
        strict_tiles(query, key_pool, value_pool) if strict
        else default_tiles(
            query, key_pool, value_pool, requests=len(lengths), most_rows=most_rows
        )
    )  # fmt: skip
    return make_work_list(
        len(query), row_starts=row_starts, lengths=lengths, counts=counts, tail_start=tail_start,
        group=query.shape[1] // key_pool.shape[1], tiles=tiles,
        most=most_splits(block_table, block_size, tiles),
    )  # fmt: skip


def _check_options(window: int | None, softcap: float | None) -> None:
    """Raise `ValueError` unless these are None or what they can be."""
    check_at_least("window", window, 1)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be None or a number > 0, got {softcap!r}")


def _check_pool(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    block_size: int,
    *,
    sinks: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Raise `ValueError` unless the rows, the pool and its table fit each other."""
    check_shape("query", query, (None,) * 3, "[T, Hq, D]")
    check_shape("key_pool", key_pool, (None, None, query.shape[2]), "[slots, Hkv, D]")
    check_shape("value_pool", value_pool, (*key_pool.shape[:2], None), "[slots, Hkv, Dv]")
    query_heads, kv_heads = query.shape[1], key_pool.shape[1]
    if kv_heads == 0 or query_heads % kv_heads:
        raise ValueError(
            f"query has {query_heads} heads and the pool has {kv_heads}; "
            "the query heads must be a multiple of the KV heads"
        )
    check_floating(query=query, key_pool=key_pool, value_pool=value_pool)
    check_integers("block_table", block_table, (None, None), "[B, P]")
    whole = isinstance(block_size, int) and not isinstance(block_size, bool)
    if not whole or block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, 1, 2, 4, ..., got {block_size!r}")
    if sinks is not None:
        check_shape("sinks", sinks, (query_heads,), "[Hq]")
    if lse is not None:
        check_shape("lse", lse, (query.shape[0], query_heads), "[T, Hq]")
        if not lse.is_contiguous():
            raise ValueError("lse must be contiguous; allocate it with torch.empty(T, Hq)")
    check_one_device(
        query=query, key_pool=key_pool, value_pool=value_pool, block_table=block_table,
        sinks=sinks, lse=lse,
    )  # fmt: skip


def _check_lists(
    query: Tensor,
    key_pool: Tensor,
    block_table: Tensor,
    *,
    row_starts: Tensor,
    lengths: Tensor,
    indices: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    most: int,
) -> None:
    """Raise `ValueError` unless the requests' integers fit each other; `most` tokens fit a row."""
    batch, kv_heads = block_table.shape[0], key_pool.shape[1]
    integers = {
        "row_starts": (row_starts, (batch + 1,), "[B + 1]"),
        "lengths": (lengths, (batch,), "[B]"),
        "indices": (indices, (batch, kv_heads, None), "[B, Hkv, N]"),
        "counts": (counts, (batch, kv_heads), "[B, Hkv]"),
        "tail_start": (tail_start, (batch,), "[B]"),
    }
    for name, (tensor, shape, letters) in integers.items():
        check_integers(name, tensor, shape, letters)
    check_one_device(query=query, **{name: given[0] for name, given in integers.items()})
    check_values("lengths", lengths, minimum=0, maximum=most)
    check_values("counts", counts, minimum=READS_ALL, maximum=indices.shape[2])
    _check_rows(query, row_starts, lengths, counts)


def _check_rows(query: Tensor, row_starts: Tensor, lengths: Tensor, counts: Tensor) -> None:
    """Raise `ValueError` on the CPU unless the rows are the requests' newest, a draft's one."""
    if query.is_cuda:
        return
    rows = row_starts.diff()
    if int(row_starts[0]) != 0 or bool((rows < 0).any()) or int(row_starts[-1]) > len(query):
        raise ValueError(
            f"row_starts must ascend from 0 to at most T = {len(query)}, got {row_starts.tolist()}"
        )
    if bool((rows > lengths).any()):
        raise ValueError(
            f"a request has at most as many rows as tokens, got rows {rows.tolist()} "
            f"of lengths {lengths.tolist()}"
        )
    drafts = counts != READS_ALL
    if bool((drafts.any(dim=1) != drafts.all(dim=1)).any()):
        raise ValueError(f"counts of a request are -1 for all KV heads or for none, got {counts}")
    if bool((rows[drafts.any(dim=1)] > 1).any()):
        raise ValueError(
            f"a draft has one row, got {torch.where(drafts.any(dim=1), rows, 0).tolist()}; "
            "a request of several rows takes counts of -1"
        )
