"""Keyed rejection sampling in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.gumbel_argmax.noise import (
    SPREAD,
    WORD_BITS,
    exponentials,
    row_words,
    token_words,
    uniforms,
)
from pillarattn.kernels.keyed_rejection.purposes import ACCEPT, NEXT

# More than rounding puts a quotient wrong by.
SLACK = 1.0 + 2.0**-40


def keyed_rejection(
    probs: Tensor, rounds: Tensor, *, places: Tensor, drafted: Tensor, laws: Tensor | None,
    longest: int,
) -> Tensor:  # fmt: skip
    """Compute `kernels.keyed_rejection`."""
    first, lengths = rounds[:, 0], rounds[:, 1] - 1
    accepted = torch.zeros_like(lengths)
    if longest:
        accepted = _accepted(probs, rounds, places, drafted, laws, longest)
    law = probs[first + accepted].double()
    if longest:
        rejected = accepted < lengths
        place = places[first + accepted].where(rejected, 0)
        if laws is None:
            tokens = torch.arange(law.shape[1], device=law.device)
            rest = law.masked_fill(tokens == drafted[place].unsqueeze(1), 0.0)
        else:
            rest = law - laws[place].double()
        # p and q that differ by rounding only can reject and leave nothing: p is then the law.
        is_rest = rejected & (rest > 0).any(dim=1)
        law = torch.where(is_rest.unsqueeze(1), rest, law)
    return torch.stack([_race(law, _words(rounds, NEXT)), accepted])


def _words(rounds: Tensor, purpose: int) -> Tensor:
    """Return what the hashes of each round's noise are keyed with, `[B, 4]` int32."""
    seeds, numbers = rounds[:, 2], rounds[:, 3]
    return row_words(torch.stack([seeds, torch.full_like(seeds, purpose), numbers], dim=1))


def _accepted(
    probs: Tensor, rounds: Tensor, places: Tensor, drafted: Tensor, laws: Tensor | None,
    longest: int,
) -> Tensor:  # fmt: skip
    """Return how many drafts of each round stand, `[B]` int64."""
    i = torch.arange(longest, device=probs.device).expand(len(rounds), -1)
    given = i < rounds[:, 1:2] - 1
    rows = (rounds[:, :1] + i).where(given, 0)
    place = places[rows].where(given, 0)
    tokens = drafted[place]
    given = given & (tokens >= 0) & (tokens < probs.shape[1])
    tokens = tokens.where(given, 0)
    p = probs[rows, tokens].double()
    q = torch.ones_like(p) if laws is None else laws[place, tokens].double()
    words = _words(rounds, ACCEPT).repeat_interleave(longest, dim=0)
    u = uniforms(i.flatten(), words).view_as(p)
    # Strict, and without the quotient: a token of no target mass is rejected in any case.
    passes = given & (p > u * q) & (q > 0)
    return passes.long().cumprod(dim=1).sum(dim=1)


def _race(law: Tensor, words: Tensor) -> Tensor:
    """Return the token of the largest law / E, with keyed E ~ Exp(1), `[B]`; -1 without mass.

    E is at least its uniform number, of which the first word alone is a lower bound: quotients are
    computed exactly where they could win.
    """
    batch, size = law.shape
    best = torch.full((batch,), -1.0, dtype=torch.float64, device=law.device)
    if not law.numel():
        return torch.full((batch,), -1, dtype=torch.int64, device=law.device)
    spread = torch.arange(size, dtype=torch.int32, device=law.device) * SPREAD
    high = token_words(spread, words[:, 0, None], words[:, 1, None]).double()
    bound = torch.where(law > 0, law / (high * 2.0**-WORD_BITS), -1.0) * SLACK
    rows = torch.arange(batch, device=law.device)
    lead = bound.argmax(dim=1)
    reached = law[rows, lead] / exponentials(lead, words)
    row, token = ((bound >= reached.unsqueeze(1)) & (law > 0)).nonzero(as_tuple=True)
    race = law[row, token] / exponentials(token, words[row])
    best.scatter_reduce_(0, row, race, "amax")
    wins = race == best[row]
    lowest = torch.full((batch,), size, device=law.device)
    lowest.scatter_reduce_(0, row[wins], token[wins], "amin")
    return lowest.masked_fill(lowest == size, -1)
