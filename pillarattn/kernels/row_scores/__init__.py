"""Row scores from known log-sum-exps: of contiguous caches (inner), and of a paged pool."""

from __future__ import annotations

from torch import Tensor

from pillarattn.kernels.checks import (
    check_at_least,
    check_floating,
    check_integers,
    check_one_device,
    check_shape,
    triton_attention_limits,
)
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.row_scores import reference

__all__ = ["paged_row_scores"]

register("paged_row_scores", "reference", reference.paged_row_scores)
register(
    "paged_row_scores", "triton", "pillarattn.kernels.row_scores.triton_kernel:paged_row_scores"
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
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    first_place: Tensor | None = None,
    implementation: str = "auto",
) -> None:
    """Write the row scores of some requests of a `mixed_attention` call.

    Row i of request `scored[v]` gives `out[v, h, i, j]`, the softmax probability of key j averaged
    over the query heads of KV head h, 0 where the row does not see the key. What lies past a
    request's rows or its length is left as it was.

    Args:
        query: `[T, Hq, D]`, as in the call.
        key_pool: `[slots, Hkv, D]`.
        lse: `[T, Hq]` fp32 contiguous, the call's log-sum-exps.
        out: `[V, Hkv, Q, S]` fp32, contiguous along S; Q and S hold the largest request. With a
            `first_place`, there may be more places.
        scored: `[V]`, numbers of requests that read everything; -1 is nobody.
        row_starts, lengths, block_table, block_size, scale, window, softcap: as in the call.
        first_place: `[1]` integer, place in `out` that is written for `scored[0]`, those after it
            for the others. None: the first one.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_shape("query", query, (None,) * 3, "[T, Hq, D]")
    check_shape("key_pool", key_pool, (None, None, query.shape[2]), "[slots, Hkv, D]")
    check_floating(query=query, key_pool=key_pool)
    check_shape("lse", lse, tuple(query.shape[:2]), "[T, Hq]")
    check_integers("scored", scored, (None,), "[V]")
    shape = (None if first_place is not None else len(scored), key_pool.shape[1], None, None)
    check_shape("out", out, shape, "[V, Hkv, Q, S]")
    if first_place is not None:
        check_integers("first_place", first_place, (1,), "[1]")
        check_one_device(out=out, first_place=first_place)
    batch = len(lengths)
    check_integers("row_starts", row_starts, (batch + 1,), "[B + 1]")
    check_integers("block_table", block_table, (batch, None), "[B, P]")
    if not lse.is_contiguous() or (out.numel() and out.stride(3) != 1):
        raise ValueError("lse must be contiguous, and out along its last dimension")
    check_one_device(
        query=query, key_pool=key_pool, lse=lse, out=out, scored=scored, row_starts=row_starts,
        lengths=lengths, block_table=block_table,
    )  # fmt: skip
    check_at_least("window", window, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = choose(
        "paged_row_scores", implementation, query, key_pool,
        unsupported=triton_attention_limits(query, key_pool, None, scale=scale),
    )  # fmt: skip
    compute(
        query, key_pool, lse, out, scored=scored, row_starts=row_starts, lengths=lengths,
        block_table=block_table, block_size=block_size, scale=scale, window=window,
        softcap=softcap, first_place=first_place,
    )  # fmt: skip
