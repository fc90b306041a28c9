"""Block verification: judge the draft as a whole, and accept at least as much of it."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.datatypes import Draft, Verdict
from pillarattn.decoding.acceptance.base import ACCEPTANCE
from pillarattn.decoding.acceptance.rejection import RejectionRule


@ACCEPTANCE.register("block")
class BlockRule(RejectionRule):
    """Follows the target's law exactly, as token-wise rejection does, and wastes less of a draft.

    A token that the target likes better than the draft does makes up for one before it that it
    likes less, so that in expectation no fewer tokens are accepted than token by token, whatever
    the two laws are. Noise comes from torch's global generator.

    Source: Sun et al., "Block verification accelerates speculative decoding" (arXiv 2403.10444),
    algorithm 2.
    """

    def judge(self, draft: Draft, logits: Tensor, steps: list[int]) -> Verdict:
        """Accept the longest part of the draft whose own test succeeds."""
        batch, k = draft.tokens.shape
        device = logits.device
        uniforms = torch.rand(batch, k, dtype=torch.float64, device=device)
        noise = torch.empty(batch, logits.shape[-1], dtype=torch.float64, device=device)
        noise.exponential_()
        accepted, next_tokens = block_verify(
            draft, logits.softmax(dim=-1), uniforms=uniforms, noise=noise
        )
        return Verdict(accepted.tolist(), next_tokens)


def block_verify(
    draft: Draft, target_probs: Tensor, *, uniforms: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many drafts are accepted, `[B]` int64, and the token after them, `[B]` int64.

    With w_0 = 1 and w_i = min(1, w_(i-1) p_i(d_i) / q_i(d_i)), the first i drafts pass their test
    with probability r_i / (r_i + 1 - w_i), where r_i is the sum of max(w_i p_(i+1) - q_(i+1), 0);
    the whole draft passes with w_k. The longest that passes is accepted, and the next token drawn
    from that maximum, normalised, or from p after the whole draft.

    Args:
        draft: see `Draft`; without `probs` its tokens are point masses.
        target_probs: `[B, k + 1, V]`, p; NaN where no token is possible.
        uniforms: `[B, k]` fp64 in [0, 1).
        noise: `[B, V]` fp64, Exp(1).

    A next token of -1 says that none is possible.
    """
    batch, k = draft.tokens.shape
    rows = torch.arange(batch, device=target_probs.device)
    ends = draft.lengths
    if ends is None:
        ends = torch.full((batch,), k, device=target_probs.device)
    weight = torch.ones(batch, dtype=torch.float64, device=target_probs.device)
    accepted = torch.zeros_like(ends)
    # What the next token is drawn from, if the draft is accepted up to `accepted`.
    law = _rest(draft, target_probs, weight, 0, ends)
    for i in range(k):
        token = draft.tokens[:, i]
        p = target_probs[rows, i, token].double()
        q = torch.ones_like(p) if draft.probs is None else draft.probs[rows, i, token].double()
        ratio = torch.where((p > 0) & (q > 0), p / q, 0.0)
        weight = (weight * ratio).clamp_max(1.0)
        rest = _rest(draft, target_probs, weight, i + 1, ends)
        left = rest.sum(dim=-1)
        # Where nothing is left, p is q: the row goes on for certain, and this test does not matter.
        chance = torch.where(left > 0, left / (left + 1.0 - weight), (weight >= 1.0).double())
        # Nothing after this draft can pass: it was the last, or it ends the text.
        chance = torch.where((ends == i + 1) | left.isnan(), weight, chance)
        passes = (uniforms[:, i] < chance) & (i < ends)
        accepted = torch.where(passes, i + 1, accepted)
        law = torch.where(passes.unsqueeze(-1), rest, law)
    plain = target_probs[rows, accepted].double()
    # p and q that differ by rounding only can leave nothing: p is then the law.
    law = torch.where((law > 0).any(dim=-1, keepdim=True), law, plain)
    # The smallest of exponentials with these rates; a rate of 0 never wins.
    race = torch.where(law > 0, law / noise, -1.0)
    best, token = race.max(dim=-1)
    return accepted, token.masked_fill(best < 0, -1)


def _rest(draft: Draft, target_probs: Tensor, weight: Tensor, i: int, ends: Tensor) -> Tensor:
    """Return what q leaves of `weight` p at position i, `[B, V]` fp64; all of p after the draft."""
    p = target_probs[:, i].double()
    if i >= draft.k:
        return p
    if draft.probs is None:
        q = torch.zeros_like(p).scatter(1, draft.tokens[:, i : i + 1], 1.0)
    else:
        q = draft.probs[:, i].double()
    rest = (weight.unsqueeze(-1) * p - q).clamp_min(0.0)
    return torch.where((ends == i).unsqueeze(-1), p, rest)
