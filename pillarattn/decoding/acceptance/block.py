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
        # Of a plain step there is nothing to count, and nothing to wait for.
        return Verdict(accepted.tolist() if k else [0] * batch, next_tokens)


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
    weights = _weights(draft, target_probs)
    accepted = torch.zeros_like(ends)
    for i in range(1, k + 1):
        chance = weight = weights[:, i]
        # Where nothing after this draft can pass, as it was the last or ends the text, it passes
        # with its weight.
        if i < k:
            q = None if draft.probs is None else draft.probs[:, i]
            left = _rest(target_probs[:, i], q, draft.tokens[:, i], weight).sum(dim=-1)
            # Where nothing is left, p is q: the row goes on for certain, and this test does not
            # matter.
            test = torch.where(left > 0, left / (left + 1.0 - weight), (weight >= 1.0).double())
            chance = torch.where((ends == i) | left.isnan(), weight, test)
        passes = (uniforms[:, i - 1] < chance) & (i <= ends)
        accepted = torch.where(passes, i, accepted)
    plain = target_probs[rows, accepted].double()
    law = plain
    if k:
        place = accepted.clamp_max(k - 1)
        q = None if draft.probs is None else draft.probs[rows, place]
        weight = weights.gather(1, accepted.unsqueeze(1)).squeeze(1)
        rest = _rest(plain, q, draft.tokens[rows, place], weight)
        # p and q that differ by rounding only can leave nothing: p is then the law.
        is_rest = (accepted < ends).unsqueeze(-1) & (rest > 0).any(dim=-1, keepdim=True)
        law = torch.where(is_rest, rest, plain)
    # The smallest of exponentials with these rates; a rate of 0 never wins.
    race = torch.where(law > 0, law / noise, -1.0)
    best, token = race.max(dim=-1)
    return accepted, token.masked_fill(best < 0, -1)


def _weights(draft: Draft, target_probs: Tensor) -> Tensor:
    """Return w_0 to w_k, `[B, k + 1]` fp64."""
    tokens = draft.tokens.unsqueeze(-1)
    p = target_probs[:, : draft.k].gather(-1, tokens).squeeze(-1).double()
    if draft.probs is None:
        q = torch.ones_like(p)
    else:
        q = draft.probs.gather(-1, tokens).squeeze(-1).double()
    ratios = torch.where((p > 0) & (q > 0), p / q, 0.0)
    weights = [torch.ones(len(p), dtype=torch.float64, device=p.device)]
    for ratio in ratios.unbind(1):
        weights.append((weights[-1] * ratio).clamp_max(1.0))
    return torch.stack(weights, dim=1)


def _rest(p: Tensor, q: Tensor | None, token: Tensor, weight: Tensor) -> Tensor:
    """Return what q `[B, V]` leaves of `weight` p, fp64; without q, a draft is a point mass."""
    weighted = weight.unsqueeze(-1) * p.double()
    if q is None:
        # No weight reaches past 1.
        return weighted.scatter_(1, token.unsqueeze(-1), 0.0)
    return weighted.sub_(q).clamp_min_(0.0)
