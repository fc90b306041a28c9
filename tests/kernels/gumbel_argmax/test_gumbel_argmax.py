"""Gumbel argmax: one noise on every machine, the softmax's law, and what impossible rows give."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import gumbel_argmax
from pillarattn.kernels.gumbel_argmax.noise import row_words, scores

KEYS = [[0, 0, 0], [-1, 2, 3], [2**62 + 5, 7, 2**33], [-(2**63), 2**40, -9], [5, 5 + 2**32, 1]]


def all_scores(logits, keys):
    """Every token's sum, without the bounds that spare most of them."""
    words, tokens = row_words(keys), torch.arange(logits.shape[1])
    rows = [
        scores(row, tokens, w.expand(len(tokens), 4)) for row, w in zip(logits, words, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 97, 5003])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_it_is_the_argmax_of_the_sums(dtype, size, scale) -> None:
    logits = (torch.randn(60, size) * scale).to(dtype)
    keys = torch.randint(-(2**63), 2**63 - 1, (60, 3))
    assert torch.equal(gumbel_argmax(logits, keys), all_scores(logits, keys).argmax(dim=1))
