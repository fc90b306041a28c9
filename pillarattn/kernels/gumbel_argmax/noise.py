"""The noise of (seed, row, step, token), from integer hashes and exactly rounded arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int, bits: int) -> int:
    """Return the number that has these bits in two's complement."""
    return value - (1 << bits) if value >> (bits - 1) else value


# splitmix64, which mixes a row's key.
GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
KEY_FACTORS = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
# What spreads neighbouring tokens, and the two factors that mix them with the key.
SPREAD = _signed(0x9E3779B1, 32)
TOKEN_FACTORS = (0x7FEB352D, _signed(0x846CA68B, 32))
# A word has so many bits; a uniform number has two words.
WORD_BITS = 31
LARGEST_UNIFORM = 1.0 - 2.0**-53
LN2 = 0.6931471805599453
# About the root of 2, between 1 and 2: a number that fp32 holds too, as Triton compares with it.
MIDDLE = 1.4140625
# log((1 + s) / (1 - s)) = 2 s (1 + s^2 / 3 + s^4 / 5 + ...); where s^2 < 0.03 this is all of it.
SERIES = tuple(1.0 / n for n in range(21, 0, -2))


def row_words(keys: Tensor) -> Tensor:
    """Return what the hashes of a row's tokens are keyed with, `[R, 4]` int32: two pairs.

    Args:
        keys: `[R, 3]` int64.
    """
    key = torch.zeros_like(keys[:, 0])
    for part in keys.unbind(1):
        key = _mixed_key(key + part + GOLDEN)
    return torch.stack([key, _mixed_key(key + GOLDEN)], dim=1).view(torch.int32)


def _mixed_key(key: Tensor) -> Tensor:
    key = (key ^ _shifted(key, 30)) * KEY_FACTORS[0]
    key = (key ^ _shifted(key, 27)) * KEY_FACTORS[1]
    return key ^ _shifted(key, 31)


def _shifted(key: Tensor, places: int) -> Tensor:
    """Shift right without copies of the sign."""
    return (key >> places) & ((1 << (64 - places)) - 1)


def token_words(spread: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return hashes of 31 bits, int32, of tokens under keys of two words; the arguments broadcast.

    Under one key no more than two of 2^32 tokens share a hash.

    Args:
        spread: tokens times `SPREAD`, int32.
        first, second: int32.
    """
    word = spread + first
    fold = word >> 16
    word ^= fold.bitwise_and_(0xFFFF)
    word *= TOKEN_FACTORS[0]
    fold = torch.bitwise_right_shift(word, 15, out=fold)
    word ^= fold.bitwise_and_(0x1FFFF)
    word ^= second
    word *= TOKEN_FACTORS[1]
    # With copies of the sign: they cancel the sign bit, and 31 bits are left.
    word ^= torch.bitwise_right_shift(word, 16, out=fold)
    return word


def scores(logits: Tensor, tokens: Tensor, words: Tensor) -> Tensor:
    """Return logits plus Gumbel noise, fp64.

    Sums, products and quotients that IEEE 754 rounds exactly are all that it is made of, so that
    every machine finds the same bits; its logarithm is therefore its own.

    Args:
        logits: `[N]`.
        tokens: `[N]` int64.
        words: `[N, 4]` int32, each token's row of `row_words`.
    """
    exponent, rest = _split(exponentials(tokens, words))
    return logits.double() - (exponent * LN2 + _log_near_one(rest))


def uniforms(tokens: Tensor, words: Tensor) -> Tensor:
    """Return uniform numbers of tokens under their keys, fp64 in (0, 1).

    Args:
        tokens: `[N]` int64.
        words: `[N, 4]` int32, each token's row of `row_words`.
    """
    spread = tokens.to(torch.int32) * SPREAD
    high, low = token_words(spread, words.T[0::2], words.T[1::2]).double()
    uniform = high * 2.0**-WORD_BITS + (low + 0.5) * 4.0**-WORD_BITS
    return uniform.clamp_max(LARGEST_UNIFORM)


def exponentials(tokens: Tensor, words: Tensor) -> Tensor:
    """Return -log(1 - u) of `uniforms`, fp64."""
    uniform = uniforms(tokens, words)
    # A small u is not taken from 1, since small exponentials are what wins.
    small = uniform < 0.25
    exponent, rest = _split(1.0 - uniform)
    exponent, rest = exponent.masked_fill_(small, 0.0), torch.where(small, -uniform, rest)
    return -(exponent * LN2 + _log_near_one(rest))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e and y with x = 2^e (1 + y), 1 + y near 1, of positive normal fp64 numbers."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    upper = mantissa > MIDDLE
    mantissa = torch.where(upper, mantissa * 0.5, mantissa)
    return (exponent + upper).double(), mantissa - 1.0


def _log_near_one(x: Tensor) -> Tensor:
    """Return log(1 + x) for x in -0.3..0.42, with a small relative error also near 0."""
    s = x / (x + 2.0)
    square = s * s
    total = torch.full_like(square, SERIES[0])
    for factor in SERIES[1:]:
        total.mul_(square).add_(factor)
    return total.mul_(s + s)
