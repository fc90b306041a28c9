"""Rejection sampling: accept drafted tokens so that what is emitted follows the target's law."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_floating, check_one_device, check_shape
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.rejection_sample import reference

register("rejection_sample", "reference", reference.rejection_sample)
register(
    "rejection_sample",
    "triton",
    "pillarattn.kernels.rejection_sample.triton_kernel:rejection_sample",
)


def rejection_sample(
    draft_tokens: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    uniforms: Tensor | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Accept a leading part of the draft and sample the token after it, losslessly.

    Draft d_i is accepted with probability min(1, p_i(d_i) / q_i(d_i)). The first one rejected is
    replaced by a sample of max(p_i - q_i, 0), normalised; if none is, the distribution after the
    draft gives one more token.

    Args:
        draft_tokens: `[B, k]` int64, k >= 0, each sampled from its row of `draft_probs`.
        target_probs: `[B, k + 1, V]`, p, each row summing to 1, or NaN where no token is possible:
            nothing is accepted there.
        draft_probs: `[B, k, V]`, q; None if the drafts are point masses (q is 1 at the draft).
        draft_lengths: `[B]` int64, tokens that each row drafted, 0..k; None: k in every row.
        uniforms: `[B, k]` fp64 in [0, 1); drawn if None.
        noise: `[B, V]` Exp(1); drawn in fp64 if None. One a row is enough: a row uses it once.
        generator: source of both draws; None is torch's global one.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        accepted `[B]` int64, 0..draft_lengths; next_tokens `[B]` int64, -1 where the law is NaN
        or 0 everywhere.

    Raises:
        ValueError: a shape, dtype or device is wrong.

    Source: arXiv 2512.01278; reference.md section 2.
    """
    check_shape("draft_tokens", draft_tokens, (None, None), "[B, k]")
    if draft_tokens.dtype != torch.int64:
        raise ValueError(f"draft_tokens must be int64, got {draft_tokens.dtype}; convert them")
    batch, k = draft_tokens.shape
    check_shape("target_probs", target_probs, (batch, k + 1, None), "[B, k + 1, V]")
    vocabulary = target_probs.shape[2]
    check_floating(target_probs=target_probs)
    if draft_probs is not None:
        check_shape("draft_probs", draft_probs, (batch, k, vocabulary), "[B, k, V]")
        check_floating(draft_probs=draft_probs)
    if draft_lengths is not None:
        check_shape("draft_lengths", draft_lengths, (batch,), "[B]")
    device = target_probs.device
    if uniforms is None:
        uniforms = torch.rand(batch, k, dtype=torch.float64, device=device, generator=generator)
    if noise is None:
        # Near zero, fp32 noise is too coarse for the rare tokens of a large vocabulary.
        noise = torch.empty(batch, vocabulary, dtype=torch.float64, device=device)
        noise.exponential_(generator=generator)
    check_shape("uniforms", uniforms, (batch, k), "[B, k]")
    check_shape("noise", noise, (batch, vocabulary), "[B, V]")
    check_floating(uniforms=uniforms)
    check_floating(noise=noise)
    check_one_device(
        draft_tokens=draft_tokens,
        target_probs=target_probs,
        draft_probs=draft_probs,
        draft_lengths=draft_lengths,
        uniforms=uniforms,
        noise=noise,
    )
    sample = choose("rejection_sample", implementation, target_probs)
    verdict: tuple[Tensor, Tensor] = sample(
        draft_tokens,
        target_probs,
        draft_probs=draft_probs,
        draft_lengths=draft_lengths,
        uniforms=uniforms,
        noise=noise,
    )
    return verdict
