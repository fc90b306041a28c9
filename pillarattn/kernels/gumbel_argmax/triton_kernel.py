"""Gumbel argmax in Triton: a bound of every stretch of a row, then the exact sums of very few.

The arithmetic is that of `noise.py` and `reference.py`, and `README.md` says why it is enough.
"""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from pillarattn.kernels.block_sizes import power_of_two
from pillarattn.kernels.gumbel_argmax import noise, reference

# Tokens of a stretch, which one bound stands for.
STRETCH = 1024
# Stretches of a program of the first launch: several, where there are enough to fill a GPU.
SEVERAL, ENOUGH = 4, 2048

# One kernel serves wherever a key's parts lie, and whichever integer stands for one.
_PARTS = ("seeds", "rows", "steps")

_GOLDEN = tl.constexpr(noise.GOLDEN)
_KEY_FACTOR_0, _KEY_FACTOR_1 = (tl.constexpr(factor) for factor in noise.KEY_FACTORS)
_SPREAD = tl.constexpr(noise.SPREAD)
_TOKEN_FACTOR_0, _TOKEN_FACTOR_1 = (tl.constexpr(factor) for factor in noise.TOKEN_FACTORS)
_LN2, _MIDDLE = tl.constexpr(noise.LN2), tl.constexpr(noise.MIDDLE)
_LARGEST_UNIFORM = tl.constexpr(noise.LARGEST_UNIFORM)
_LOG_BIT, _OFFSET = tl.constexpr(reference.LOG_BIT), tl.constexpr(reference.OFFSET)
_SLACK, _SLACK_SHARE = tl.constexpr(reference.SLACK), tl.constexpr(reference.SLACK_SHARE)


@triton.jit
def _mixed_key(key):
    key = (key ^ ((key >> 30) & 0x3FFFFFFFF)) * _KEY_FACTOR_0
    key = (key ^ ((key >> 27) & 0x1FFFFFFFFF)) * _KEY_FACTOR_1
    return key ^ ((key >> 31) & 0x1FFFFFFFF)


@triton.jit
def _key_part(part, row, stride):
    """Return a row's part of its key; one integer may be that of all rows."""
    if part.dtype.is_ptr():
        value = tl.load(part + row * stride)
    else:
        value = part.to(tl.int64)
    return value


@triton.jit
def _row_key(seeds, rows, steps, row, stride_s, stride_r, stride_t):
    key = _mixed_key(_key_part(seeds, row, stride_s) + _GOLDEN)
    key = _mixed_key(key + _key_part(rows, row, stride_r) + _GOLDEN)
    return _mixed_key(key + _key_part(steps, row, stride_t) + _GOLDEN)


@triton.jit
def _scaled(x, factor, SCALING: tl.constexpr):
    """Return logits over a temperature, fp32, as the device's torch divides by a number."""
    x = x.to(tl.float32)
    if SCALING == "times":
        x = x * factor
    elif SCALING == "over":
        # What "/" compiles to is rounded otherwise.
        x = tl.div_rn(x, factor)
    return x


@triton.jit
def _words(tokens, key):
    """Return a hash of 31 bits of each token, int32."""
    word = tokens * _SPREAD + key.to(tl.int32)
    word = (word ^ ((word >> 16) & 0xFFFF)) * _TOKEN_FACTOR_0
    word = word ^ ((word >> 15) & 0x1FFFF) ^ (key >> 32).to(tl.int32)
    word = word * _TOKEN_FACTOR_1
    return word ^ (word >> 16)


@triton.jit
def _log_near_one(x):
    s = x / (x + 2.0)
    square = s * s
    total = square * (1.0 / 21.0) + (1.0 / 19.0)
    total = total * square + (1.0 / 17.0)
    total = total * square + (1.0 / 15.0)
    total = total * square + (1.0 / 13.0)
    total = total * square + (1.0 / 11.0)
    total = total * square + (1.0 / 9.0)
    total = total * square + (1.0 / 7.0)
    total = total * square + (1.0 / 5.0)
    total = total * square + (1.0 / 3.0)
    return (s + s) * (total * square + 1.0)


@triton.jit
def _split(x):
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    upper = mantissa > _MIDDLE
    mantissa = tl.where(upper, mantissa * 0.5, mantissa)
    return (exponent + upper.to(tl.int64)).to(tl.float64), mantissa - 1.0


@triton.jit
def _uniforms(tokens, key):
    """Return uniform numbers, fp64: bit for bit what `noise.uniforms` does."""
    high = _words(tokens, key).to(tl.float64)
    low = _words(tokens, _mixed_key(key + _GOLDEN)).to(tl.float64)
    uniform = high * (2.0**-31) + (low + 0.5) * (2.0**-62)
    return tl.where(uniform < 1.0, uniform, _LARGEST_UNIFORM)


@triton.jit
def _exponentials(tokens, key):
    uniform = _uniforms(tokens, key)
    small = uniform < 0.25
    exponent, rest = _split(1.0 - uniform)
    exponent, rest = tl.where(small, 0.0, exponent), tl.where(small, -uniform, rest)
    return -(exponent * _LN2 + _log_near_one(rest))


@triton.jit
def _scores(x, tokens, key):
    """Return logits plus noise, fp64: bit for bit what `noise.scores` does."""
    exponent, rest = _split(_exponentials(tokens, key))
    return x.to(tl.float64) - (exponent * _LN2 + _log_near_one(rest))


@triton.jit(do_not_specialize=_PARTS)
def _bound_kernel(
    logits, seeds, rows, steps, bounds, stride_lr, stride_lv, stride_ks, stride_kr, stride_kt,
    size, stretches, factor, STRETCH: tl.constexpr, STRETCHES: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Write what no sum of a stretch exceeds; +inf where a logit is NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1) * STRETCHES + tl.arange(0, STRETCHES)
    tokens = stretch[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
    place = logits + row * stride_lr + tokens.to(tl.int64) * stride_lv
    x = _scaled(tl.load(place, mask=tokens < size, other=-float("inf")), factor, SCALING)
    key = _row_key(seeds, rows, steps, row, stride_ks, stride_kr, stride_kt)
    u = _words(tokens, key).to(tl.float32)
    rate = u * (u * (2.0**-32) + 1.0) + 2.0**-32
    bound = x - rate.to(tl.int32, bitcast=True).to(tl.float32) * _LOG_BIT
    # A maximum may pass over NaN; a fused product and sum may stay below a quotient of +inf.
    bound = tl.where(x < float("inf"), bound, float("inf"))
    tl.store(bounds + row * stretches + stretch, tl.max(bound, 1), mask=stretch < stretches)


@triton.jit(do_not_specialize=_PARTS)
def _choose_kernel(
    logits, seeds, rows, steps, bounds, out, stride_lr, stride_lv, stride_ks, stride_kr, stride_kt,
    size, stretches, factor, STRETCH: tl.constexpr, BLOCK: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Look exactly at the stretch of the largest bound, then at those it does not rule out."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    bound = tl.load(
        bounds + row * stretches + places, mask=places < stretches, other=-float("inf")
    ).to(tl.float64)
    top = tl.max(bound, 0)
    slack = _OFFSET + _SLACK + tl.abs(bound) * _SLACK_SHARE
    bound += tl.where(slack < float("inf"), slack, 0.0)
    possible = (top > -float("inf")) & (top < float("inf"))
    key = _row_key(seeds, rows, steps, row, stride_ks, stride_kr, stride_kt)
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], -1, tl.int64)
    stretch = tl.where(possible, tl.argmax(bound, 0), stretches)
    while stretch < stretches:
        tokens = stretch * STRETCH + tl.arange(0, STRETCH)
        inside = tokens < size
        place = logits + row * stride_lr + tokens.to(tl.int64) * stride_lv
        x = _scaled(tl.load(place, mask=inside, other=-float("inf")), factor, SCALING)
        reached = tl.where(inside, _scores(x, tokens, key), -float("inf"))
        most = tl.max(reached, 0)
        lowest = tl.min(tl.where(reached == most, tokens, 2147483647), 0).to(tl.int64)
        wins = (most > best) | ((most == best) & (lowest < token))
        token = tl.where(wins, lowest, token)
        best = tl.where(wins, most, best)
        bound = tl.where(places == stretch, -float("inf"), bound)
        stretch = tl.min(tl.where(bound >= best, places, stretches), 0)
    tl.store(out + row, token)


def scaling_of(temperature: float | None, *, is_cuda: bool) -> tuple[str, float]:
    """Return what is done to logits, and the fp32 number that it is done with.

    On CUDA torch multiplies by a number's inverse, rounded to fp32 once; on a CPU it divides.
    """
    if temperature is None:
        return "none", 1.0
    if is_cuda:
        return "times", ctypes.c_float(1.0 / temperature).value
    return "over", ctypes.c_float(temperature).value


def gumbel_argmax(
    logits: Tensor, keys: Tensor | tuple[Tensor | int, ...], temperature: float | None = None
) -> Tensor:
    """Compute `kernels.gumbel_argmax`."""
    rows, size = logits.shape
    if not logits.numel():
        return torch.full((rows,), -1, dtype=torch.int64, device=logits.device)
    scaling, factor = scaling_of(temperature, is_cuda=logits.is_cuda)
    if not torch.finfo(torch.float32).tiny <= factor < float("inf"):
        # Such a number would make NaN of what lies past the last token, or is not held exactly.
        logits, scaling = reference.scaled(logits, temperature), "none"
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    stretches = -(-size // STRETCH)
    at_once = SEVERAL if rows * stretches >= ENOUGH else 1
    bounds = torch.empty(rows, stretches, dtype=torch.float32, device=logits.device)
    parts = keys.unbind(1) if isinstance(keys, Tensor) else keys
    strides = [part.stride(0) if isinstance(part, Tensor) else 0 for part in parts]
    given = (*logits.stride(), *strides, size, stretches, factor)
    with torch.cuda.device_of(logits):
        _bound_kernel[(rows, -(-stretches // at_once))](
            logits, *parts, bounds, *given,
            STRETCH=STRETCH, STRETCHES=at_once, SCALING=scaling, num_warps=4,
        )  # fmt: skip
        # A fused product and sum is rounded once where the reference rounds twice.
        _choose_kernel[(rows,)](
            logits, *parts, bounds, out, *given, STRETCH=STRETCH, BLOCK=power_of_two(stretches),
            SCALING=scaling, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
