"""Sampling as an argmax: logits plus Gumbel noise that a key and the token determine."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.checks import check_floating, check_one_device, check_shape
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.gumbel_argmax import reference

__all__ = ["gumbel_argmax"]

register("gumbel_argmax", "reference", reference.gumbel_argmax)
register("gumbel_argmax", "triton", "pillarattn.kernels.gumbel_argmax.triton_kernel:gumbel_argmax")


def gumbel_argmax(logits: Tensor, keys: Tensor, *, implementation: str = "auto") -> Tensor:
    """Draw one token a row from softmax(logits): the argmax of logits plus keyed Gumbel noise.

    The noise of a token is a function of its row's key and of the token alone: the same bits on
    every device, in every implementation and in any batch. Equal sums go to the lowest token.

    Args:
        logits: `[R, V]`, fp16, bf16, fp32 or fp64; -inf is a token that is not allowed.
        keys: `[R, 3]` int64, any values: seed, row and step.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[R]` int64; -1 where a logit is NaN or +inf, or where all are -inf.

    Raises:
        ValueError: a shape, dtype or device is wrong.
    """
    check_shape("logits", logits, (None, None), "[R, V]")
    check_floating(logits=logits)
    check_shape("keys", keys, (logits.shape[0], 3), "[R, 3]")
    if keys.dtype != torch.int64:
        raise ValueError(f"keys must be int64, got {keys.dtype}; convert them")
    check_one_device(logits=logits, keys=keys)
    # A token has no gradient.
    logits = logits.detach()
    # The kernel's bounds are fp32, which does not hold every fp64 number.
    unsupported = "fp64" if logits.dtype == torch.float64 else None
    draw = choose("gumbel_argmax", implementation, logits, keys, unsupported=unsupported)
    tokens: Tensor = draw(logits, keys)
    return tokens
