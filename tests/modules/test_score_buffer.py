"""Scores of a verify pass, kept row by row until it is known which rows count."""

from __future__ import annotations

import pytest
import torch

from pillarattn.datatypes import RowLengths
from pillarattn.kernels import verify_attention
from pillarattn.modules import ScoreBuffer

BATCH, HEADS, QUERIES, SIZE = 3, 2, 4, 12


@pytest.fixture
def stored():
    lengths = RowLengths([12, 9, 10], "cpu")
    scores = {index: torch.rand(BATCH, HEADS, QUERIES, SIZE) for index in (1, 4)}
    buffer = ScoreBuffer()
    for index, rows in scores.items():
        buffer.put(index, rows, lengths)
    return buffer, scores, lengths


def test_pool_averages_the_leading_rows_of_each_batch_row(stored):
    buffer, scores, _ = stored
    counted = [1, 4, 2]
    pooled = buffer.pool([4, 1], rows=torch.tensor(counted), end=8)
    assert pooled.shape == (2 * BATCH, HEADS, 8) and pooled.dtype == torch.float32
    for place, index in enumerate((4, 1)):
        for row, n in enumerate(counted):
            wanted = scores[index][row, :, :n, :8].mean(dim=1)
            torch.testing.assert_close(pooled[place * BATCH + row], wanted)


def test_visible_divides_by_the_rows_that_could_see_a_key(stored):
    buffer, scores, lengths = stored
    pooled = buffer.pool([1], rows=torch.full((BATCH,), QUERIES), end=SIZE, normalise="visible")
    for row, length in enumerate(lengths.host):
        for j in range(SIZE):
            total = scores[1][row, :, :, j].sum(dim=1)
            wanted = total / min(QUERIES, length - j) if j < length else torch.zeros(HEADS)
            torch.testing.assert_close(pooled[row, :, j], wanted)


def test_put_replaces_and_membership_tells(stored):
    buffer, _, lengths = stored
    assert 1 in buffer and 4 in buffer and 0 not in buffer
    buffer.put(1, torch.ones(BATCH, HEADS, QUERIES, SIZE), lengths)
    pooled = buffer.pool([1], rows=torch.tensor([2, 2, 2]), end=5)
    assert (pooled == 1).all()


def test_the_oracle_figures_of_the_reference():
    # Uniform logits, 3 verify rows, 8 keys (reference.md 7.5).
    query, keys = torch.zeros(1, 4, 3, 8), torch.randn(1, 2, 8, 8)
    lengths = RowLengths([8], "cpu")
    _, rows = verify_attention(query, keys, keys, lengths=lengths.tensor, return_scores=True)
    buffer = ScoreBuffer()
    buffer.put(0, rows, lengths)
    pooled = buffer.pool([0], rows=torch.tensor([3]), end=8, normalise="visible")[0, 0]
    wanted = torch.tensor([0.144841] * 6 + [0.133929, 0.125])
    torch.testing.assert_close(pooled, wanted, atol=1e-6, rtol=0)
    assert float(pooled.sum()) == pytest.approx(1.127976, abs=1e-6)
    assert float(pooled[:6].sum()) <= 1


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("normalise", ["rows", "visible"])
def test_scores_equal_a_dense_oracle(group, normalise):
    lengths, queries, dim = RowLengths([11, 7], "cpu"), 3, 8
    query = torch.randn(2, 2 * group, queries, dim, dtype=torch.float64)
    keys = torch.randn(2, 2, 11, dim, dtype=torch.float64)
    _, rows = verify_attention(query, keys, keys, lengths=lengths.tensor, return_scores=True)
    buffer = ScoreBuffer()
    buffer.put(0, rows, lengths)
    counted = torch.tensor([3, 3] if normalise == "visible" else [3, 1])
    pooled = buffer.pool([0], rows=counted, end=11, normalise=normalise)
    for row, length in enumerate(lengths.host):
        for head in range(2):
            total = torch.zeros(11, dtype=torch.float64)
            seen = torch.zeros(11)
            for i in range(int(counted[row])):
                end = length - queries + i + 1
                seen[:end] += 1
                for g in range(group):
                    q = query[row, head * group + g, i]
                    total[:end] += (keys[row, head, :end] @ q / dim**0.5).softmax(0) / group
            by = seen.clamp_min(1) if normalise == "visible" else int(counted[row])
            torch.testing.assert_close(pooled[row, head], (total / by).float())


def test_scores_ignore_a_constant_per_row_and_the_order_of_heads_in_a_group():
    lengths = torch.tensor([10])
    query, keys = torch.randn(1, 8, 3, 8).double(), torch.randn(1, 2, 10, 8).double()

    def scores(query, keys):
        return verify_attention(query, keys, keys, lengths=lengths, return_scores=True)[1]

    # Adding c to every key adds q.c, a constant, to all logits of a row.
    torch.testing.assert_close(scores(query, keys), scores(query, keys + torch.randn(8)))
    order = torch.tensor([2, 0, 3, 1, 7, 4, 6, 5])
    torch.testing.assert_close(scores(query, keys), scores(query[:, order], keys))
    across = torch.tensor([4, 0, 3, 1, 2, 7, 6, 5])
    assert not torch.allclose(scores(query, keys), scores(query[:, across], keys))


def test_one_text_is_pooled_in_place_as_any_batch_is(stored):
    _, scores, lengths = stored
    rows, end = 3, 8
    one = ScoreBuffer()
    for index, row_scores in scores.items():
        one.put(index, row_scores[1:2], RowLengths([lengths.host[1]], "cpu"))
    pooled = one.pool([4, 1], rows=torch.tensor([rows]), end=end)
    wanted = torch.stack([scores[i][1, :, :rows, :end].mean(dim=1) for i in (4, 1)])
    torch.testing.assert_close(pooled, wanted)
    # Past the row's length (9) there is nothing, whatever the memory holds.
    assert one.pool([4], rows=torch.tensor([rows]), end=SIZE)[..., 9:].eq(0).all()


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_pooled_scores_are_fp32_whatever_the_default_dtype_is(stored, default):
    buffer, _, _ = stored
    rows = torch.tensor([1, 4, 2])
    wanted = buffer.pool([4, 1], rows=rows, end=8)
    torch.set_default_dtype(default)
    try:
        pooled = buffer.pool([4, 1], rows=rows, end=8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert pooled.dtype == torch.float32 and torch.equal(pooled, wanted)


def test_taking_a_layers_scores_forgets_them(stored):
    buffer, scores, _ = stored
    assert torch.equal(buffer.take(4), scores[4])
    assert 4 not in buffer and 1 in buffer
