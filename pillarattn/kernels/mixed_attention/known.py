"""Guards on scores by known normalisers, and what the Triton kernel takes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_integers, check_one_device, check_shape
from pillarattn.kernels.mixed_attention.tiles import default_tiles


def check_known(
    query: Tensor,
    key_pool: Tensor,
    row_starts: Tensor,
    counts: Tensor,
    *,
    kept_lse: Tensor | None,
    kept_place: Tensor | None,
    scores: Tensor | None,
    score_place: Tensor | None,
    first_place: Tensor | None,
) -> None:
    """Raise `ValueError` unless these arguments of `kernels.mixed_attention` fit each other."""
    if kept_lse is None or kept_place is None or scores is None or score_place is None:
        raise ValueError(
            "kept_lse, kept_place, scores and score_place must be given together, and first_place "
            "only with them"
        )
    batch, kv_heads = counts.shape
    check_shape("scores", scores, (None, kv_heads, None, None), "[V, Hkv, Q, S]")
    check_shape("kept_lse", kept_lse, (batch, None, query.shape[1]), "[B, W, Hq]")
    check_integers("kept_place", kept_place, (batch,), "[B]")
    check_integers("score_place", score_place, (batch,), "[B]")
    if first_place is not None:
        check_integers("first_place", first_place, (1,), "[1]")
    if kept_lse.dtype != torch.float32 or scores.dtype != torch.float32:
        raise ValueError(
            f"kept_lse and scores must be fp32, got {kept_lse.dtype} and {scores.dtype}"
        )
    if not kept_lse.is_contiguous() or (scores.numel() and scores.stride(3) != 1):
        raise ValueError("kept_lse must be contiguous, and scores along their last dimension")
    check_one_device(
        query=query, key_pool=key_pool, kept_lse=kept_lse, kept_place=kept_place, scores=scores,
        score_place=score_place, first_place=first_place,
    )  # fmt: skip
    if not query.is_cuda:
        _check_places(row_starts, counts, kept_lse, kept_place, scores, score_place, first_place)


def _check_places(
    row_starts: Tensor, counts: Tensor, kept_lse: Tensor, kept_place: Tensor, scores: Tensor,
    score_place: Tensor, first_place: Tensor | None,
) -> None:  # fmt: skip
    """Raise `ValueError` on the CPU unless there is room, and each request does one of both."""
    rows, width = row_starts.diff(), kept_lse.shape[1]
    keeps, is_scored = kept_place > 0, score_place > 0
    if bool((rows[keeps] != 1).any()) or bool((kept_place > width).any()):
        raise ValueError(
            f"kept_place must be in 0..{width}, and more than 0 only where a request has one row, "
            f"got {kept_place.tolist()} of rows {rows.tolist()}"
        )
    if bool((keeps & is_scored).any()) or bool((counts[is_scored] >= 0).any()):
        raise ValueError(
            "a request that is scored must read everything and keep nothing, got score_place "
            f"{score_place.tolist()} and kept_place {kept_place.tolist()}"
        )
    first = 0 if first_place is None else int(first_place)
    most = int(rows[is_scored].max()) if bool(is_scored.any()) else 0
    ends = score_place + first
    if most > scores.shape[2] or most - 1 > width or bool((ends[is_scored] > len(scores)).any()):
        raise ValueError(
            f"scores [{len(scores)}, Hkv, {scores.shape[2]}, S] and kept_lse [B, {width}, Hq] have "
            f"no room for {most} rows at places {ends[is_scored].tolist()}"
        )


def score_limits(query: Tensor, key_pool: Tensor, value_pool: Tensor) -> str | None:
    """Return what the Triton kernel cannot score, or None."""
    group = query.shape[1] // key_pool.shape[1]
    most = default_tiles(query, key_pool, value_pool).block_rows
    if group > most:
        return f"scores of {group} query heads a KV head (it takes up to {most} of this dtype)"
    return None
