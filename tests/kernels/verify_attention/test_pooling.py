"""Pooling of row scores: the paper's divisors, and rows that do not count."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import attention_scores, pool_rows


def uniform_scores(queries: int, length: int, size: int) -> torch.Tensor:
    return attention_scores(
        torch.zeros(1, 2, queries, 8), torch.randn(1, 1, size, 8), lengths=torch.tensor([length])
    )


def test_uniform_logits_law() -> None:
    """reference.md 7.5."""
    scores = uniform_scores(3, 8, 10)
    pooled = pool_rows(
        scores, lengths=torch.tensor([8]), rows=torch.tensor([3]), normalise="visible"
    )
    want = torch.tensor([0.144841] * 6 + [0.133929, 0.125, 0, 0])
    torch.testing.assert_close(pooled[0, 0], want, rtol=0, atol=1e-6)
    assert pooled.sum().item() == pytest.approx(1.127976, abs=1e-6)
    assert pooled[0, 0, :6].sum() <= 1


@pytest.mark.parametrize("normalise", ["rows", "visible"])
def test_matches_a_loop(normalise: str) -> None:
    batch, heads, queries, size = 3, 2, 5, 40
    scores = torch.rand(batch, heads, queries, size)
    lengths, rows = torch.tensor([40, 33, 4]), torch.tensor([5, 1, 3])
    for b in range(batch):
        # Neither rows that do not count nor columns past the end may be read.
        scores[b, :, int(rows[b]) :] = float("nan")
        scores[b, :, :, int(lengths[b]) :] = float("nan")
    pooled = pool_rows(scores, lengths=lengths, rows=rows, normalise=normalise)
    assert pooled.dtype == torch.float32
    for b in range(batch):
        for j in range(size):
            if j >= lengths[b]:
                assert not pooled[b, :, j].any()
                continue
            divisor = rows[b] if normalise == "rows" else min(queries, int(lengths[b]) - j)
            want = scores[b, :, : int(rows[b]), j].sum(-1) / divisor
            torch.testing.assert_close(pooled[b, :, j], want)


def test_order_is_that_of_the_sum() -> None:
    """reference.md 7.6: among keys that all rows see, the divisor is one constant."""
    scores = torch.rand(1, 1, 4, 50)
    arguments = {"lengths": torch.tensor([50]), "rows": torch.tensor([4])}
    by_rows = pool_rows(scores, **arguments)[0, 0, :46]
    visible = pool_rows(scores, **arguments, normalise="visible")[0, 0, :46]
    assert torch.equal(by_rows.argsort(), visible.argsort())


def test_row_limit_is_scoring_without_the_bonus_row() -> None:
    """reference.md 7.7: G = 4, k = 8 and a tile of 32 rows."""
    query, keys = torch.randn(1, 4, 9, 16), torch.randn(1, 1, 65, 16)
    lengths = torch.tensor([65])
    limited = attention_scores(query, keys, lengths=lengths, row_limit=32)
    whole = attention_scores(query, keys, lengths=lengths)
    got = pool_rows(limited, lengths=lengths, rows=torch.tensor([9]), normalise="visible")
    want = pool_rows(whole, lengths=lengths, rows=torch.tensor([8]))
    torch.testing.assert_close(got[..., :57], want[..., :57] * 8 / 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.tensor([0])}, "rows must be in 1..3"),
        ({"rows": torch.tensor([4])}, "rows must be in 1..3"),
        ({"normalise": "mean"}, "'rows', 'visible'"),
        ({"lengths": torch.tensor([8, 8])}, "lengths must have shape"),
    ],
    ids=["no-rows", "many-rows", "normalise", "lengths"],
)
def test_wrong_input_is_refused(change: dict, message: str) -> None:
    arguments = {"lengths": torch.tensor([8]), "rows": torch.tensor([3]), **change}
    with pytest.raises(ValueError, match=message):
        pool_rows(torch.rand(1, 1, 3, 8), **arguments)
