"""Rejection sampling in plain PyTorch: count what is accepted, then sample one residual a row."""

from __future__ import annotations

import torch
from torch import Tensor


def rejection_sample(
    draft_tokens: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None,
    draft_lengths: Tensor | None,
    uniforms: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.rejection_sample`."""
    batch, k = draft_tokens.shape
    tokens = draft_tokens.unsqueeze(-1)
    target = target_probs[:, :k].gather(-1, tokens).squeeze(-1).double()
    if draft_probs is None:
        draft = torch.ones_like(target)
    else:
        draft = draft_probs.gather(-1, tokens).squeeze(-1).double()
    # Strict, and without the quotient: a token of no target mass is rejected even at u = 0.
    accept = (target > uniforms.double() * draft) & (draft > 0)
    accepted = accept.long().cumprod(dim=-1).sum(dim=-1)
    ends: Tensor | int = k
    if draft_lengths is not None:
        ends = draft_lengths
        accepted = accepted.minimum(draft_lengths)

    rows = torch.arange(batch, device=target_probs.device)
    last = target_probs[rows, accepted].double()
    if k:
        rejected = (accepted < ends).unsqueeze(-1)
        place = accepted.clamp_max(k - 1)
        if draft_probs is None:
            residual = last.scatter(-1, draft_tokens[rows, place].unsqueeze(-1), 0.0)
        else:
            residual = (last - draft_probs[rows, place].double()).clamp_min(0.0)
        # p and q that differ by rounding only can reject and leave nothing: p is then the law.
        rejected = rejected & (residual > 0).any(-1, keepdim=True)
        last = torch.where(rejected, residual, last)
    # The smallest of exponentials with these rates. A rate of 0 never wins, even over noise of 0.
    race = torch.where(last > 0, last / noise.double(), -1.0)
    best, token = race.max(dim=-1)
    return accepted, token.masked_fill(best < 0, -1)
