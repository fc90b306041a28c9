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


# One integer of a key, of each row or of all.
Part = Tensor | int


def gumbel_argmax(
    logits: Tensor,
    keys: Tensor | tuple[Part, Part, Part],
    *,
    temperature: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Draw one token a row from softmax(logits): the argmax of logits plus keyed Gumbel noise.

    The noise of a token is a function of its row's key and of the token alone: the same bits on
    every device, in every implementation and in any batch. Equal sums go to the lowest token.

    Args:
        logits: `[R, V]`, fp16, bf16, fp32 or fp64; -inf is a token that is not allowed.
        keys: `[R, 3]` int64, any values: seed, row and step. Or these three one by one, each `[R]`
            int64 or an integer for all rows.
        temperature: > 0, of softmax(logits / temperature); None: 1. Tokens are those of
            `logits.float() / temperature`, bit for bit as torch divides on the device (fp64 in
            fp64), which is not stored.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[R]` int64; -1 where a logit is NaN or +inf, or where all are -inf.

    Raises:
        ValueError: a shape, dtype, device, integer or temperature is wrong.
    """
    check_shape("logits", logits, (None, None), "[R, V]")
    check_floating(logits=logits)
    tensors = _checked_keys(keys, logits)
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature must be None or a number > 0, got {temperature!r}")
    if temperature == 1:
        # Exact, and a product less.
        temperature = None
    # A token has no gradient.
    logits = logits.detach()
    # The kernel's bounds are fp32, which does not hold every fp64 number.
    unsupported = "fp64" if logits.dtype == torch.float64 else None
    draw = choose("gumbel_argmax", implementation, logits, *tensors, unsupported=unsupported)
    tokens: Tensor = draw(logits, keys, temperature)
    return tokens


def _checked_keys(keys: Tensor | tuple[Part, Part, Part], logits: Tensor) -> list[Tensor]:
    """Return the tensors among keys; raise `ValueError` where they do not fit the logits."""
    rows = logits.shape[0]
    named = {}
    if isinstance(keys, Tensor):
        check_shape("keys", keys, (rows, 3), "[R, 3]")
        named["keys"] = keys
    else:
        for name, part in zip(("seeds", "rows", "steps"), keys, strict=True):
            if isinstance(part, Tensor):
                check_shape(name, part, (rows,), "[R]")
                named[name] = part
            elif not -(2**63) <= part < 2**63:
                raise ValueError(f"{name} must fit 64 bits with a sign, got {part}")
    for name, tensor in named.items():
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {tensor.dtype}; convert them")
    check_one_device(logits=logits, **named)
    return list(named.values())
