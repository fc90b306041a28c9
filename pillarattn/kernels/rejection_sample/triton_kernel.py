"""Rejection sampling in Triton: every stretch of a row runs its part of the race, then one ends it.

Each program counts by itself what its row accepts, so that no launch waits for a count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two

# Tokens that a program races.
STRETCH = 1024


@triton.jit
def _best(law, noise, tokens):
    """Return the largest law / noise of tokens that have mass and its lowest token; -1 if none has.

    Products and quotients of fp64 are rounded as the reference's.
    """
    drawn = tl.load(noise, mask=law > 0, other=1.0).to(tl.float64)
    race = tl.where(law > 0, law / drawn, -1.0)
    best = tl.max(race, 0)
    return best, tl.min(tl.where(race == best, tokens, 2147483647), 0)


@triton.jit
def _race_kernel(
    draft, target_probs, draft_probs, lengths, uniforms, noise, accepted, bests, places,
    stride_db, stride_di, stride_pb, stride_pi, stride_pv, stride_qb, stride_qi, stride_qv,
    stride_lb, stride_ub, stride_ui, stride_nb, stride_nv, k, size, stretches,
    STRETCH: tl.constexpr, BLOCK_K: tl.constexpr, HAS_PROBS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Count what the row accepts, and race one stretch of the law that its next token has."""
    b = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    i = tl.arange(0, BLOCK_K)
    given = i < k
    wide_i = i.to(tl.int64)
    drafted = tl.load(draft + b * stride_db + wide_i * stride_di, mask=given, other=0)
    # No token of the vocabulary: it has no mass.
    given = given & (drafted >= 0) & (drafted < size)
    target = target_probs + b * stride_pb
    p = tl.load(target + wide_i * stride_pi + drafted * stride_pv, mask=given, other=0.0)
    u = tl.load(uniforms + b * stride_ub + i * stride_ui, mask=given, other=0.0).to(tl.float64)
    q = tl.full([BLOCK_K], 1.0, tl.float64)
    if HAS_PROBS:
        own = draft_probs + b * stride_qb
        q = tl.load(own + wide_i * stride_qi + drafted * stride_qv, mask=given, other=0.0)
        q = q.to(tl.float64)
    passes = given & (p.to(tl.float64) > u * q) & (q > 0)
    count = tl.minimum(tl.min(tl.where(passes, BLOCK_K, i), 0), k)
    end = k
    if HAS_LENGTHS:
        end = tl.load(lengths + b * stride_lb).to(tl.int32)
        end = tl.minimum(end, k)
        count = tl.minimum(count, end)
    at = count.to(tl.int64)
    if stretch == 0:
        tl.store(accepted + b, at)
    tokens = stretch * STRETCH + tl.arange(0, STRETCH)
    inside = tokens < size
    wide = tokens.to(tl.int64)
    place = target + at * stride_pi + wide * stride_pv
    plain = tl.load(place, mask=inside, other=0.0).to(tl.float64)
    drawn = noise + b * stride_nb + wide * stride_nv
    best = tl.full([], -1.0, tl.float64)
    token = tl.full([], 0, tl.int32)
    kind = tl.full([], 0, tl.int32)
    if count < end:
        if HAS_PROBS:
            place = draft_probs + b * stride_qb + at * stride_qi + wide * stride_qv
            rest = plain - tl.load(place, mask=inside, other=0.0).to(tl.float64)
        else:
            rejected = tl.load(draft + b * stride_db + at * stride_di)
            rest = tl.where(wide == rejected, 0.0, plain)
        best, token = _best(rest, drawn, tokens)
        kind = tl.where(best >= 0, 1, 0)
    # Where the row has a residual anywhere, the plain law of this stretch is not asked for.
    if kind == 0:
        best, token = _best(plain, drawn, tokens)
    tl.store(bests + (b * stretches + stretch) * 2 + kind, best)
    tl.store(bests + (b * stretches + stretch) * 2 + 1 - kind, -1.0)
    tl.store(places + b * stretches + stretch, token)


@triton.jit
def _end_kernel(bests, places, out, stretches, BLOCK: tl.constexpr):
    """Take the winner of the residual, or of the plain law where no stretch has a residual."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < stretches
    plain = tl.load(bests + (b * stretches + i) * 2, mask=inside, other=-1.0)
    rest = tl.load(bests + (b * stretches + i) * 2 + 1, mask=inside, other=-1.0)
    token = tl.load(places + b * stretches + i, mask=inside, other=2147483647)
    race = tl.where(tl.max(rest, 0) >= 0, rest, plain)
    best = tl.max(race, 0)
    lowest = tl.min(tl.where(race == best, token, 2147483647), 0).to(tl.int64)
    tl.store(out + b, tl.where(best >= 0, lowest, -1))


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
    size, device = target_probs.shape[2], target_probs.device
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    following = torch.empty_like(accepted)
    if not batch:
        return accepted, following
    stretches = -(-size // STRETCH)
    bests = torch.empty(batch, stretches, 2, dtype=torch.float64, device=device)
    places = torch.empty(batch, stretches, dtype=torch.int32, device=device)
    with torch.cuda.device_of(target_probs):
        _race_kernel[(batch, stretches)](
            draft_tokens, target_probs, draft_probs, draft_lengths, uniforms, noise, accepted,
            bests, places, *draft_tokens.stride(), *target_probs.stride(),
            *((0, 0, 0) if draft_probs is None else draft_probs.stride()),
            0 if draft_lengths is None else draft_lengths.stride(0),
            *uniforms.stride(), *noise.stride(), k, size, stretches,
            STRETCH=STRETCH, BLOCK_K=power_of_two(k), HAS_PROBS=draft_probs is not None,
            HAS_LENGTHS=draft_lengths is not None, num_warps=4,
        )  # fmt: skip
        _end_kernel[(batch,)](
            bests, places, following, stretches, BLOCK=power_of_two(stretches), num_warps=1
        )
    return accepted, following
