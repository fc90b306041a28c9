"""Verify attention: causal full attention of the newest rows, and the scores of every key."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pillarattn.kernels.checks import (
    check_at_least,
    check_attention_inputs,
    triton_attention_limits,
)
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.verify_attention import reference
from pillarattn.kernels.verify_attention.pooled import pooled_attention
from pillarattn.kernels.verify_attention.pooling import pool_rows
from pillarattn.kernels.workspace import Workspace

__all__ = ["attention_scores", "pool_rows", "pooled_attention", "verify_attention"]

_TRITON = "pillarattn.kernels.verify_attention.launch"

register("verify_attention", "reference", reference.verify_attention)
register("attention_scores", "reference", reference.attention_scores)
register("verify_attention", "triton", f"{_TRITON}:verify_attention")
register("attention_scores", "triton", f"{_TRITON}:attention_scores")


def verify_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_scores: bool = False,
    row_limit: int | None = None,
    workspace: Workspace | None = None,
    strict: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend causally from the newest Q tokens of each row to all keys, and score the keys.

    Query i of row b sits at position `lengths[b] - Q + i` and sees positions up to its own. Query
    head h uses KV head h // G. A query at a negative position sees nothing and yields zeros.

    Args:
        query: `[B, Hq, Q, D]`, fp16, bf16, fp32 or fp64.
        keys: `[B, Hkv, S, D]`, a view of the cache; what lies at or past `lengths` is undefined.
        values: `[B, Hkv, S, Dv]`, likewise.
        lengths: `[B]`, tokens in each row, the Q new ones included.
        scale: factor on the logits; None is D ** -0.5.
        window: see only positions > own position - window; None is no window.
        softcap: logits become softcap * tanh(logits / softcap); None is no cap.
        sinks: `[Hq]` or None, logits that take a share of the softmax and have no value.
        return_scores: whether to return the row scores.
        row_limit: emulates the paper's code: rows whose packed index `i * G + g` is at or past it
            add nothing to the scores, whose divisor stays G. The output does not change.
        workspace: memory that the reference may use instead of fresh one, for the scores too; see
            `Workspace.of_layer`. None: all memory is fresh.
        strict: give each row the bits that it gets alone, whatever Q and B are; Triton only.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        The output `[B, Hq, Q, Dv]` in the query's dtype, accumulated in fp32 (fp64 for fp64); and,
        if asked for, row scores `[B, Hkv, Q, S]` fp32: the softmax probability of each key,
        averaged over the G query heads of the group, 0 where a row does not see the key.

    Raises:
        ValueError: a shape, dtype, device, range or (on the CPU) length is wrong, or `strict` is
            asked of the reference.

    Source: arXiv 2512.01278; reference.md 1.3 and 1.4.
    """
    check_attention_inputs(
        query, keys, values, lengths=lengths, window=window, softcap=softcap, sinks=sinks
    )
    check_at_least("row_limit", row_limit, 0)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = choose(
        "verify_attention",
        implementation,
        query,
        keys,
        values,
        unsupported=triton_attention_limits(query, keys, values, scale=scale),
    )
    options = _own_options(compute, workspace, strict)
    result: tuple[Tensor, Tensor | None] = compute(
        query,
        keys,
        values,
        lengths=lengths,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_scores=return_scores,
        row_limit=row_limit,
        **options,
    )
    return result


def _own_options(compute: Any, workspace: Workspace | None, strict: bool) -> dict[str, Any]:
    """Return what only one of the implementations takes."""
    if compute is not reference.verify_attention:
        return {"strict": strict}
    if strict:
        raise ValueError(
            "strict=True needs the Triton kernel: products of PyTorch depend on the number of "
            "rows; move the tensors to CUDA, or pass strict=False"
        )
    return {"workspace": workspace}


def attention_scores(
    query: Tensor,
    keys: Tensor,
    *,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    row_limit: int | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return the row scores of `verify_attention` without its output, `[B, Hkv, Q, S]` fp32.

    Shapes, dtypes, options and errors are those of `verify_attention`; no values are read. This
    seeds the first selection from the prompt's last rows.
    """
    check_attention_inputs(
        query, keys, None, lengths=lengths, window=window, softcap=softcap, sinks=sinks
    )
    check_at_least("row_limit", row_limit, 0)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = choose(
        "attention_scores",
        implementation,
        query,
        keys,
        unsupported=triton_attention_limits(query, keys, None, scale=scale),
    )
    scores: Tensor = compute(
        query,
        keys,
        lengths=lengths,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        row_limit=row_limit,
    )
    return scores
