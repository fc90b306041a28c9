"""Rejection sampling of ragged rounds, with noise that a seed and a number determine."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_floating, check_one_device, check_shape
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.keyed_rejection import reference
from pillarattn.kernels.keyed_rejection.purposes import ACCEPT, DRAFT, NEXT

__all__ = ["ACCEPT", "DRAFT", "NEXT", "keyed_rejection"]

register("keyed_rejection", "reference", reference.keyed_rejection)
register(
    "keyed_rejection", "triton", "pillarattn.kernels.keyed_rejection.triton_kernel:keyed_rejection"
)


def keyed_rejection(
    probs: Tensor,
    rounds: Tensor,
    *,
    places: Tensor,
    drafted: Tensor,
    laws: Tensor | None,
    longest: int,
    implementation: str = "auto",
) -> Tensor:
    """Accept a leading part of each round's draft and sample the token after it, losslessly.

    As `rejection_sample`, but over rows that lie one round after the other, with drafts and their
    laws in a store that all rounds share, and noise made of (seed, purpose, number, token): the
    same bits on every device, in every implementation and in any batch.

    Args:
        probs: `[R, V]`, p; NaN where no token is possible.
        rounds: `[B, 4]` int64: a round's first row, its rows (its drafts and one more), its seed,
            and a number that no other round of this seed has.
        places: `[R]` int64, where the draft that follows a row lies; of a round's last row, which
            none follows, any value.
        drafted: `[N]` int64, tokens; one outside the vocabulary never stands.
        laws: `[N, V]`, q, what each was drawn from; NaN: it never stands. None: point masses.
        longest: drafts of the longest round; known without asking the device.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[2, B]` int64: the token after the drafts that stand, -1 where p there is NaN or 0
        everywhere, and how many stand.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_shape("probs", probs, (None, None), "[R, V]")
    check_shape("rounds", rounds, (None, 4), "[B, 4]")
    check_shape("places", places, (probs.shape[0],), "[R]")
    check_shape("drafted", drafted, (None,), "[N]")
    check_floating(probs=probs)
    if laws is not None:
        check_shape("laws", laws, (drafted.shape[0], probs.shape[1]), "[N, V]")
        check_floating(laws=laws)
    for name, tensor in (("rounds", rounds), ("places", places), ("drafted", drafted)):
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {tensor.dtype}; convert it")
    check_one_device(probs=probs, rounds=rounds, places=places, drafted=drafted, laws=laws)
    judge = choose("keyed_rejection", implementation, probs)
    verdicts: Tensor = judge(
        probs, rounds, places=places, drafted=drafted, laws=laws, longest=longest
    )
    return verdicts
