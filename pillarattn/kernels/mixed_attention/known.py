"""Row scores out of an attention pass, by normalisers that are known before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_integers, check_one_device, check_shape
from pillarattn.kernels.mixed_attention.tiles import MOST_ROWS, default_tiles


@dataclass(frozen=True)
class KnownScores:
    """What drafts have left of their softmax, and where scores by it go; it is written to.

    A draft leaves its log-sum-exp, which is nearly that of the row which verifies it. Row i and key
    j of a scored request b get

        scores[n - 1 + first_place, h, i, j] = (1/G) sum_g exp(logit(i, g, j) - kept(i, g))

    with n = `score_place[b]`, kept(i, g) = `kept_lse[b, min(i, max(rows - 2, 0)), h * G + g]`, and
    0 where the row does not see the key; with `pooled_rows` the mean of these over i goes to line
    0. So the row past the last draft takes that draft's. A row and head whose kept value is not
    finite has shares of 0; where it is so far off that a share would exceed 2**14, all those of its
    row and head are from 0 to 2**15, and else undefined. What lies past a request's rows or its
    length stays as it was.

    Attributes:
        kept_lse: `[B, W, Hq]` fp32 contiguous, natural log-sum-exps of drafts, sinks included; W
            holds the drafts of the largest request that is scored.
        kept_place: `[B]` integers; n > 0 writes that of the request's single row to
            `kept_lse[b, n - 1]`. No request has both this and a `score_place`.
        scores: `[V, Hkv, Q, S]` fp32, contiguous along S; Q and S hold the largest request.
        score_place: `[B]` integers; n > 0 scores the rows of a request that reads everything.
        first_place: `[1]` integer, place in `scores` that n = 1 means. None: the first one.
        pooled_rows: rows that no scored request has more of, and that `can_pool` takes: their mean
            is all that is wanted, for which Q = 1 is enough. None: a line for each row.
    """

    kept_lse: Tensor
    kept_place: Tensor
    scores: Tensor
    score_place: Tensor
    first_place: Tensor | None = None
    pooled_rows: int | None = None


def can_pool(rows: int, group: int) -> bool:
    """Return whether one block holds all rows of a request, so that their scores can be pooled.

    Args:
        rows: of the request.
        group: query heads of a KV head.
    """
    return rows * group <= MOST_ROWS


def check_known(known: KnownScores, query: Tensor, row_starts: Tensor, counts: Tensor) -> None:
    """Raise `ValueError` unless what is known fits the other arguments of `mixed_attention`."""
    kept_lse, kept_place, scores = known.kept_lse, known.kept_place, known.scores
    score_place, first_place = known.score_place, known.first_place
    batch, kv_heads = counts.shape
    check_shape("scores", scores, (None, kv_heads, None, None), "[V, Hkv, Q, S]")
    check_shape("kept_lse", kept_lse, (batch, None, query.shape[1]), "[B, W, Hq]")
    check_integers("kept_place", kept_place, (batch,), "[B]")
    check_integers("score_place", score_place, (batch,), "[B]")
    group = query.shape[1] // kv_heads
    if known.pooled_rows is not None and not can_pool(known.pooled_rows, group):
        raise ValueError(
            f"pooled_rows times the {group} query heads of a KV head must be at most {MOST_ROWS}, "
            f"got {known.pooled_rows}; None scores each row by itself"
        )
    if first_place is not None:
        check_integers("first_place", first_place, (1,), "[1]")
    if kept_lse.dtype != torch.float32 or scores.dtype != torch.float32:
        raise ValueError(
            f"kept_lse and scores must be fp32, got {kept_lse.dtype} and {scores.dtype}"
        )
    if not kept_lse.is_contiguous() or (scores.numel() and scores.stride(3) != 1):
        raise ValueError("kept_lse must be contiguous, and scores along their last dimension")
    check_one_device(
        query=query, kept_lse=kept_lse, kept_place=kept_place, scores=scores,
        score_place=score_place, first_place=first_place,
    )  # fmt: skip
    if not query.is_cuda:
        _check_places(known, row_starts, counts)


def _check_places(known: KnownScores, row_starts: Tensor, counts: Tensor) -> None:
    """Raise `ValueError` on the CPU unless there is room, and each request does one of both."""
    kept_lse, kept_place, scores = known.kept_lse, known.kept_place, known.scores
    score_place, first_place = known.score_place, known.first_place
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
    if known.pooled_rows is not None and most > known.pooled_rows:
        raise ValueError(
            f"pooled_rows must hold the {most} rows of the largest scored request, "
            f"got {known.pooled_rows}"
        )
    lines = most if known.pooled_rows is None else min(most, 1)
    if lines > scores.shape[2] or most - 1 > width or bool((ends[is_scored] > len(scores)).any()):
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
