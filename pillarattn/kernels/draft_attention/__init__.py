"""Draft attention: one query row per sequence over the selected keys and the tail since."""

from __future__ import annotations

from torch import Tensor

from pillarattn.kernels.checks import (
    check_attention_inputs,
    check_integers,
    check_one_device,
    check_shape,
    triton_attention_limits,
)
from pillarattn.kernels.dispatch import choose, register
from pillarattn.kernels.draft_attention import reference

register("draft_attention", "reference", reference.draft_attention)
register(
    "draft_attention", "triton", "pillarattn.kernels.draft_attention.triton_kernel:draft_attention"
)


def draft_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    indices: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attend from the newest token of each row to its selected keys and everything after them.

    Row b, KV head h reads `indices[b, h, :counts[b, h]]` and positions `tail_start[b]` up to
    `lengths[b] - 1`, where the query sits. Query head h uses KV head h // G.

    Args:
        query: `[B, Hq, 1, D]`, fp16, bf16, fp32 or fp64.
        keys: `[B, Hkv, S, D]`, a view of the cache; what lies at or past `lengths` is undefined.
        values: `[B, Hkv, S, Dv]`, likewise.
        indices: `[B, Hkv, N]` int32 logical positions, ascending, all < `tail_start`.
        counts: `[B, Hkv]` int32; entries of `indices` past them are never read.
        tail_start: `[B]`, first position that is read without being selected.
        lengths: `[B]`, tokens in each row, the query's own included.
        scale: factor on the logits; None is D ** -0.5.
        window: read only positions > lengths - 1 - window; None is no window.
        softcap: logits become softcap * tanh(logits / softcap); None is no cap.
        sinks: `[Hq]` or None, logits that take a share of the softmax and have no value.
        lse: `[B, Hq, 1]` fp32 or None: written, the natural log-sum-exp of each head's logits and
            sink, -inf where nothing is read; verify scores can be normalised by it.
        implementation: "auto", "reference" or "triton"; see `dispatch.choose`.

    Returns:
        `[B, Hq, 1, Dv]` in the query's dtype, accumulated in fp32 (fp64 for fp64).

    Raises:
        ValueError: a shape, dtype, device or (on the CPU) position is wrong.

    Source: arXiv 2512.01278; reference.md 1.6.
    """
    check_attention_inputs(
        query, keys, values, lengths=lengths, window=window, softcap=softcap, sinks=sinks
    )
    _check_selection(query, keys, indices=indices, counts=counts, tail_start=tail_start, lse=lse)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = choose(
        "draft_attention",
        implementation,
        query,
        keys,
        values,
        unsupported=triton_attention_limits(query, keys, values, scale=scale),
    )
    out: Tensor = compute(
        query,
        keys,
        values,
        indices=indices,
        counts=counts,
        tail_start=tail_start,
        lengths=lengths,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        lse=lse,
    )
    return out


def _check_selection(
    query: Tensor,
    keys: Tensor,
    *,
    indices: Tensor,
    counts: Tensor,
    tail_start: Tensor,
    lse: Tensor | None,
) -> None:
    """Raise `ValueError` unless one query row comes with a selection and outputs that fit it."""
    batch, kv_heads = keys.shape[:2]
    if query.shape[2] != 1:
        raise ValueError(
            f"draft attention takes one query row per sequence, got {query.shape[2]}; "
            "use verify_attention for more"
        )
    check_integers("indices", indices, (batch, kv_heads, None), "[B, Hkv, N]")
    check_integers("counts", counts, (batch, kv_heads), "[B, Hkv]")
    check_integers("tail_start", tail_start, (batch,), "[B]")
    check_one_device(query=query, indices=indices, counts=counts, tail_start=tail_start, lse=lse)
    if lse is not None:
        check_shape("lse", lse, (batch, query.shape[1], 1), "[B, Hq, 1]")
