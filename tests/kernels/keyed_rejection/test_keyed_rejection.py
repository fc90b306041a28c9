"""Ragged rounds are judged as `rejection_sample` judges them with the same noise."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import keyed_rejection, rejection_sample
from pillarattn.kernels.gumbel_argmax.noise import exponentials, row_words, uniforms
from pillarattn.kernels.keyed_rejection import ACCEPT, DRAFT, NEXT
from tests.kernels.keyed_rejection.cases import NAN, rounds


def noise(seed, purpose, number, count, draw):
    words = row_words(torch.tensor([[seed, purpose, number]])).expand(count, 4)
    return draw(torch.arange(count), words).unsqueeze(0)


def one_by_one(given):
    """Judge each round alone, with noise that is computed for all its tokens."""
    found = []
    for first, rows, seed, number in given["rounds"].tolist():
        k, size = rows - 1, given["probs"].shape[1]
        at = given["places"][first : first + k]
        accepted, following = rejection_sample(
            given["drafted"][at].unsqueeze(0),
            given["probs"][first : first + rows].unsqueeze(0),
            draft_probs=None if given["laws"] is None else given["laws"][at].unsqueeze(0),
            uniforms=noise(seed, ACCEPT, number, k, uniforms),
            noise=noise(seed, NEXT, number, size, exponentials),
        )
        found.append([int(following), int(accepted)])
    return torch.tensor(found).view(-1, 2).T


@pytest.mark.parametrize("size", [1, 63, 1000])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [5, 0, 3, 8, 1] * 4], ids=str)
@pytest.mark.parametrize("kept", [1.0, 0.05])
def test_equal_to_padded_rounds_with_that_noise(size, lengths, kept) -> None:
    given = rounds(lengths, size, kept=kept)
    found = keyed_rejection(**given)
    assert found.dtype == torch.int64
    assert torch.equal(found, one_by_one(given))
    given["laws"] = None
    assert torch.equal(keyed_rejection(**given), one_by_one(given))


def test_laws_without_tokens() -> None:
    given = rounds([2, 2, 2, 0], 50)
    firsts = given["rounds"][:, 0].tolist()
    given["probs"][firsts[0]] = NAN
    given["probs"][firsts[3]] = 0.0
    # Of a draft that no token was possible for, and of one that is no token.
    given["laws"][given["places"][firsts[1]]] = NAN
    given["drafted"][given["places"][firsts[2]]] = -1
    tokens, accepted = keyed_rejection(**given).tolist()
    assert accepted == [0] * 4
    assert tokens[0] == tokens[3] == -1 and min(tokens[1:3]) >= 0


def test_the_law_of_two_tokens_is_the_targets() -> None:
    """Chi-square of what rounds of one seed emit first, and of what follows a draft that stood."""
    samples, size = 40_000, 5
    p = torch.tensor([[1.0, 0, 2, -1, 0.5], [0, 2, 1, 1, -1]]).softmax(-1)
    q = torch.tensor([0.0, 1, 1, 1, -0.5]).softmax(-1)
    at = torch.arange(samples)
    keys = torch.stack([torch.full_like(at, 7), torch.full_like(at, DRAFT), at], 1)
    drafted = exponentials(
        torch.arange(size).repeat(samples), row_words(keys).repeat_interleave(size, dim=0)
    )
    drafted = (q / drafted.view(samples, size)).argmax(dim=1)
    table = torch.stack([2 * at, torch.full_like(at, 2), keys[:, 0], at], 1)
    following, accepted = keyed_rejection(
        p.repeat(samples, 1), table, places=at.repeat_interleave(2), drafted=drafted,
        laws=q.expand(samples, size), longest=1,
    )  # fmt: skip
    emitted = torch.where(accepted > 0, drafted, following)
    for observed, law in ((drafted, q), (emitted, p[0]), (following[accepted == 1], p[1])):
        expected = law * len(observed)
        counts = observed.bincount(minlength=size)
        # 4 degrees of freedom at the 0.1 % level.
        assert float(((counts - expected) ** 2 / expected).sum()) < 18.47
    # What a round emits tells nothing of the next one's.
    pairs = (emitted[:-1] * size + emitted[1:]).bincount(minlength=size**2)
    expected = (p[0].unsqueeze(1) * p[0]).flatten() * (samples - 1)
    assert float(((pairs - expected) ** 2 / expected).sum()) < 51.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": torch.zeros(1, 3).long()}, r"rounds must have shape \[B, 4\]"),
        ({"rounds": torch.zeros(1, 4)}, "rounds must be int64"),
        ({"places": torch.zeros(1).long()}, r"places must have shape \[R\]"),
        ({"laws": torch.zeros(1, 9)}, r"laws must have shape \[N, V\]"),
        ({"probs": torch.zeros(5, 9).long()}, "floating point"),
    ],
)
def test_wrong_input_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        keyed_rejection(**{**rounds([1], 9), **change})
