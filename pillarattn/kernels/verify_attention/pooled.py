"""Pooled attention: the output of verify attention and one score a key, in one pass."""

from __future__ import annotations

from torch import Tensor

from pillarattn.kernels.checks import (
    check_attention_inputs,
    check_floating,
    check_one_device,
    check_shape,
    triton_attention_limits,
)
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.verify_attention import reference

register("pooled_attention", "reference", reference.pooled_attention)
register(
    "pooled_attention",
    "triton",
    "pillarattn.kernels.verify_attention.launch:pooled_attention",
)

# Packed rows that one block of the Triton kernel holds.
MAX_ROWS = 128


def pooled_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    normaliser: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `verify_attention` does, and score each key over all query rows of its KV head.

    The score of key j is the sum over the rows and heads that see it of exp(logit - n) / (Q G),
    where n is the row's `normaliser`. With the true log-sum-exp that is the mean softmax
    probability, but only a whole pass knows it; the log-sum-exp of the draft at the same position
    is close, and a factor common to all rows changes no ranking.

    Args:
        query: `[B, Hq, Q, D]`.
        keys: `[B, Hkv, S, D]`.
        values: `[B, Hkv, S, Dv]`.
        lengths: `[B]`.
        scale: see `verify_attention`, as the options below.
        window: see above.
        softcap: see above.
        sinks: see above.
        normaliser: `[B, Hq, Q]` fp32, natural logarithms. None: the true log-sum-exps in the
            reference, and those of the newest 128 keys in Triton.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        The output `[B, Hq, Q, Dv]` in the query's dtype; scores `[B, Hkv, S]` fp32, undefined where
        no row sees the key; and the true log-sum-exps `[B, Hq, Q]` fp32, -inf where a row sees
        nothing.

    Raises:
        ValueError: a shape, dtype, device, range or (on the CPU) length is wrong.
    """
    check_attention_inputs(
        query, keys, values, lengths=lengths, window=window, softcap=softcap, sinks=sinks
    )
    if normaliser is not None:
        check_shape("normaliser", normaliser, tuple(query.shape[:3]), "[B, Hq, Q]")
        check_floating(normaliser=normaliser)
        check_one_device(query=query, normaliser=normaliser)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    unsupported = triton_attention_limits(query, keys, values, scale=scale)
    rows = query.shape[2] * (query.shape[1] // keys.shape[1])
    if unsupported is None and rows > MAX_ROWS:
        unsupported = f"{rows} packed rows a KV head (it takes up to {MAX_ROWS})"
    compute = choose(
        "pooled_attention", implementation, query, keys, values, unsupported=unsupported
    )
    result: tuple[Tensor, Tensor, Tensor] = compute(
        query,
        keys,
        values,
        lengths=lengths,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        normaliser=normaliser,
    )
    return result
