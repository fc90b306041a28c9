"""The paper's row limit, divisor and fp16 scores, against sums written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pillarattn.datatypes import RowLengths
from pillarattn.kernels import verify_attention
from pillarattn.modules import ContiguousCache, ScoreBuffer

K, LENGTH, DIM = 8, 60, 8


def tile_of(group, k=K):
    return 32 if group * (k + 1) <= 48 else 64


def written_out(query, keys, group, limit):
    """Return the scores of reference.md 1.3 for one KV head: query `[G, Q, D]`, keys `[S, D]`."""
    queries, length = query.shape[1], keys.shape[0]
    scores = np.zeros(length)
    for i in range(queries):
        for g in range(group):
            if i * group + g >= limit:
                continue
            end = length - queries + i + 1
            logits = keys[:end] @ query[g, i] / np.sqrt(DIM)
            weights = np.exp(logits - logits.max())
            scores[:end] += weights / weights.sum()
    visible = np.minimum(queries, length - np.arange(length))
    return scores / (group * visible)


def scores_of(query, keys, row_limit):
    lengths = RowLengths([keys.shape[2]], "cpu")
    _, rows = verify_attention(
        query, keys, keys, lengths=lengths.tensor, return_scores=True, row_limit=row_limit
    )
    buffer = ScoreBuffer()
    buffer.put(0, rows, lengths)
    counted = torch.tensor([query.shape[2]])
    return buffer.pool([0], rows=counted, end=keys.shape[2], normalise="visible"), buffer


@pytest.mark.parametrize(("group", "dropped"), [(2, 0), (4, 4), (5, 13), (8, 8)])
def test_the_row_limit_drops_what_the_papers_kernel_drops(group, dropped):
    limit = tile_of(group)
    assert max(0, group * (K + 1) - limit) == dropped
    query = torch.randn(1, 2 * group, K + 1, DIM, dtype=torch.float64)
    keys = torch.randn(1, 2, LENGTH, DIM, dtype=torch.float64)
    pooled, _ = scores_of(query, keys, limit)
    unlimited, _ = scores_of(query, keys, None)
    for head in range(2):
        own = query[0, head * group : (head + 1) * group].numpy()
        wanted = written_out(own, keys[0, head].numpy(), group, limit)
        np.testing.assert_allclose(pooled[0, head].numpy(), wanted, rtol=2e-6)
    assert torch.equal(pooled, unlimited) is (dropped == 0)


def test_a_limit_of_32_at_four_heads_is_scoring_without_the_bonus_row():
    query = torch.randn(1, 8, K + 1, DIM, dtype=torch.float64)
    keys = torch.randn(1, 2, LENGTH, DIM, dtype=torch.float64)
    limited, _ = scores_of(query, keys, 32)
    without, _ = scores_of(query[:, :, :K], keys[:, :, :-1], None)
    fully_visible = LENGTH - K
    torch.testing.assert_close(
        limited[..., :fully_visible], without[..., :fully_visible] * (K / (K + 1))
    )


@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("emitted", [1, 5, K + 1])
def test_parity_selects_by_fp16_scores_of_all_rows(builders, group, emitted):
    query = torch.randn(1, 2 * group, K + 1, DIM, dtype=torch.float64)
    keys = torch.randn(1, 2, LENGTH, DIM, dtype=torch.float64)
    _, buffer = scores_of(query, keys, tile_of(group))
    cache = ContiguousCache(1)
    cache.layers[0].append(keys, keys)
    after = LENGTH - (K + 1 - emitted)
    cache.roll_back(RowLengths([after], "cpu"))
    selector = builders.selector_of(s=0.3, min_budget=1, parity=True)
    selection = selector.select(cache, buffer, emitted=[emitted], rows=[K + 1])[0]
    budget, recents = -(-after * 3 // 10), emitted + 1
    for head in range(2):
        own = query[0, head * group : (head + 1) * group].numpy()
        scores = written_out(own, keys[0, head].numpy(), group, tile_of(group))
        ranked = scores[: after - recents].astype(np.float16)
        best = np.argsort(-ranked.astype(np.float64), kind="stable")[: budget - recents]
        wanted = sorted([*best.tolist(), *range(after - recents, after)])
        assert builders.kept(selection, 0, head) == wanted


def test_near_uniform_scores_tie_in_fp16_and_stay_apart_in_fp32(builders):
    scores = (1 + torch.linspace(0, 0.003, 131072)) / 131072
    assert scores.half().unique().numel() <= 2
    assert scores.unique().numel() > 10_000
    rows = {"lengths": [131072], "budgets": [100]}
    request = builders.request_of(**rows, scores=scores.repeat(1, 2, 1))
    indices, _ = request.keep_best(request.scores)
    assert torch.equal(scores[indices[0, 0].long()].sort().values, scores.topk(100).values.flip(0))
    tied, _ = request.keep_best(request.scores.half() * 0 + 1)
    assert tied[0, 0].tolist() == list(range(100))
