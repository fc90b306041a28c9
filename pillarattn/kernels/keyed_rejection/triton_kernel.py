"""Keyed rejection sampling in Triton: `rejection_sample`'s race, with noise made where it is read.

The arithmetic is that of `reference.py`, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two
from pillarattn.kernels.gumbel_argmax import noise
from pillarattn.kernels.gumbel_argmax.triton_kernel import _exponentials, _mixed_key, _uniforms
from pillarattn.kernels.keyed_rejection import purposes
from pillarattn.kernels.rejection_sample.triton_kernel import _end_kernel

# Tokens that a program races.
STRETCH = 1024
# Drafts of a round that no new kernel is compiled for: their number changes from step to step.
FEW = 16

_GOLDEN = tl.constexpr(noise.GOLDEN)
_ACCEPT, _NEXT = tl.constexpr(purposes.ACCEPT), tl.constexpr(purposes.NEXT)


@triton.jit
def _key(seed, number, PURPOSE: tl.constexpr):
    key = _mixed_key(seed + _GOLDEN)
    key = _mixed_key(key + PURPOSE + _GOLDEN)
    return _mixed_key(key + number + _GOLDEN)


@triton.jit
def _best(law, drawn, tokens):
    """Return the largest law / E of tokens that have mass and its lowest token; -1 if none has."""
    race = tl.where(law > 0, law / drawn, -1.0)
    best = tl.max(race, 0)
    return best, tl.min(tl.where(race == best, tokens, 2147483647), 0)


@triton.jit
def _keyed_race_kernel(
    probs, rounds, places, drafted, laws, verdicts, bests, winners,
    stride_pr, stride_pv, stride_rb, stride_rp, stride_a, stride_d, stride_qr, stride_qv,
    size, stretches, STRETCH: tl.constexpr, BLOCK_K: tl.constexpr, HAS_LAWS: tl.constexpr,
):  # fmt: skip
    """Count what a round accepts, and race one stretch of the law that its next token has."""
    b = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    own = rounds + b * stride_rb
    first = tl.load(own)
    end = (tl.load(own + stride_rp) - 1).to(tl.int32)
    seed = tl.load(own + 2 * stride_rp)
    number = tl.load(own + 3 * stride_rp)
    i = tl.arange(0, BLOCK_K)
    given = i < end
    rows = first + i.to(tl.int64)
    place = tl.load(places + rows * stride_a, mask=given, other=0)
    token = tl.load(drafted + place * stride_d, mask=given, other=0)
    # No token of the vocabulary: it has no mass.
    known = given & (token >= 0) & (token < size)
    p = tl.load(probs + rows * stride_pr + token * stride_pv, mask=known, other=0.0).to(tl.float64)
    q = tl.full([BLOCK_K], 1.0, tl.float64)
    if HAS_LAWS:
        q = tl.load(laws + place * stride_qr + token * stride_qv, mask=known, other=0.0)
        q = q.to(tl.float64)
    u = _uniforms(i, _key(seed, number, _ACCEPT))
    passes = known & (p > u * q) & (q > 0)
    count = tl.minimum(tl.min(tl.where(passes, BLOCK_K, i), 0), end)
    if stretch == 0:
        tl.store(verdicts + tl.num_programs(0) + b, count.to(tl.int64))
    tokens = stretch * STRETCH + tl.arange(0, STRETCH)
    inside = tokens < size
    wide = tokens.to(tl.int64)
    at = first + count
    plain = tl.load(probs + at * stride_pr + wide * stride_pv, mask=inside, other=0.0)
    plain = plain.to(tl.float64)
    drawn = _exponentials(tokens, _key(seed, number, _NEXT))
    best = tl.full([], -1.0, tl.float64)
    winner = tl.full([], 0, tl.int32)
    kind = tl.full([], 0, tl.int32)
    if count < end:
        lost = tl.load(places + at * stride_a)
        if HAS_LAWS:
            law = laws + lost * stride_qr + wide * stride_qv
            rest = plain - tl.load(law, mask=inside, other=0.0).to(tl.float64)
        else:
            rest = tl.where(wide == tl.load(drafted + lost * stride_d), 0.0, plain)
        best, winner = _best(rest, drawn, tokens)
        kind = tl.where(best >= 0, 1, 0)
    # Where the round has a residual anywhere, the plain law of this stretch is not asked for.
    if kind == 0:
        best, winner = _best(plain, drawn, tokens)
    tl.store(bests + (b * stretches + stretch) * 2 + kind, best)
    tl.store(bests + (b * stretches + stretch) * 2 + 1 - kind, -1.0)
    tl.store(winners + b * stretches + stretch, winner)


def keyed_rejection(
    probs: Tensor, rounds: Tensor, *, places: Tensor, drafted: Tensor, laws: Tensor | None,
    longest: int,
) -> Tensor:  # fmt: skip
    """Compute `kernels.keyed_rejection`."""
    batch, size, device = len(rounds), probs.shape[1], probs.device
    verdicts = torch.empty(2, batch, dtype=torch.int64, device=device)
    if not batch:
        return verdicts
    stretches = -(-size // STRETCH)
    bests = torch.empty(batch, stretches, 2, dtype=torch.float64, device=device)
    winners = torch.empty(batch, stretches, dtype=torch.int32, device=device)
    with torch.cuda.device_of(probs):
        # A fused product and sum is rounded once where the reference rounds twice.
        _keyed_race_kernel[(batch, stretches)](
            probs, rounds, places, drafted, laws, verdicts, bests, winners, *probs.stride(),
            *rounds.stride(), places.stride(0), drafted.stride(0),
            *((0, 0) if laws is None else laws.stride()), size, stretches,
            STRETCH=STRETCH, BLOCK_K=max(FEW, power_of_two(longest)), HAS_LAWS=laws is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _end_kernel[(batch,)](
            bests, winners, verdicts, stretches, BLOCK=power_of_two(stretches), num_warps=1
        )
    return verdicts
