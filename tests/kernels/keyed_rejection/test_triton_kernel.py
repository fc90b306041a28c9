"""The Triton kernel accepts and draws what the reference does, token for token."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import keyed_rejection
from tests.kernels.keyed_rejection.cases import NAN, rounds


@pytest.fixture
def agree(triton_device, monkeypatch):
    """Return a call that compares both implementations and returns what they found."""
    from pillarattn.kernels.keyed_rejection import triton_kernel

    # Small vocabularies have several stretches too.
    monkeypatch.setattr(triton_kernel, "STRETCH", 64)

    def call(given):
        wanted = keyed_rejection(implementation="reference", **given)
        moved = {
            name: one.to(triton_device) if isinstance(one, torch.Tensor) else one
            for name, one in given.items()
        }
        got = keyed_rejection(implementation="triton", **moved)
        assert got.dtype == torch.int64 and got.tolist() == wanted.tolist()
        return wanted.tolist()

    return call


@pytest.mark.parametrize("size", [1, 64, 150])
@pytest.mark.parametrize("lengths", [[], [0], [1, 0], [6, 2, 0, 17, 1]], ids=str)
@pytest.mark.parametrize("kept", [1.0, 0.05])
def test_equal_to_the_reference(agree, size, lengths, kept) -> None:
    given = rounds(lengths, size, kept=kept)
    agree(given)
    agree({**given, "laws": None})
    if kept < 1:
        agree({**given, "probs": given["probs"].half(), "laws": given["laws"].half()})


def test_laws_without_tokens(agree) -> None:
    size = 70
    given = rounds([3] * 12, size)
    for i, first in enumerate(given["rounds"][:, 0].tolist()):
        row, kind = first + i % 3, i // 3
        if kind < 2:
            given["probs"][row] = NAN if kind else 0.0
        elif kind == 2:
            given["laws"][given["places"][row]] = NAN
        else:
            given["drafted"][given["places"][row]] = (-1, size, 2**40)[i % 3]
    tokens, _ = agree(given)
    assert -1 in tokens[:6] and min(tokens[6:]) >= 0


def test_what_is_left_of_equal_laws(agree) -> None:
    """No residual anywhere: the plain law; one in a single stretch: that one wins the round."""
    given = rounds([1] * 8, 140)
    firsts = given["rounds"][:, 0]
    own = given["places"][firsts]
    given["laws"][own] = given["probs"][firsts]
    # Never accepted, and nothing is left by it.
    given["drafted"][own] = -1
    tokens, accepted = agree(given)
    assert accepted == [0] * 8 and len(set(tokens)) > 3
    given["laws"][own[4:], 100] *= 1 - 1e-3
    tokens, _ = agree(given)
    assert tokens[4:] == [100] * 4 and set(tokens[:4]) != {100}


def test_views_of_larger_tensors_and_whole_stretches(agree, monkeypatch) -> None:
    from pillarattn.kernels.keyed_rejection import triton_kernel

    given = rounds([4, 0, 2], 260)
    for name in ("probs", "laws"):
        given[name] = given[name].repeat_interleave(2, dim=1)[:, ::2]
    for name in ("places", "drafted"):
        given[name] = given[name].repeat_interleave(3)[::3]
    given["rounds"] = given["rounds"].T.contiguous().T
    agree(given)
    monkeypatch.setattr(triton_kernel, "STRETCH", 1024)
    agree(rounds([2, 3], 1500))
