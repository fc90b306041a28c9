"""Verify attention in plain PyTorch: one matrix product per KV head for all its query rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pillarattn.kernels.softmax import (
    accumulation_dtype,
    attention_probabilities,
    log_sum_exp,
)
from pillarattn.kernels.workspace import Workspace

# Up to so many keys PyTorch's own attention is faster for one row (14 against 33 us for 128 keys,
# 75 against 91 for 1,000; one thread of an AMD EPYC, 9 heads of 64).
FEW_KEYS = 1024


def verify_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    return_scores: bool,
    row_limit: int | None,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `kernels.verify_attention`; K and V are read once per group and never expanded."""
    batch, query_heads, queries, _ = query.shape
    first, shortest, longest = _key_range(lengths, queries, window)
    # In half precision a plain step must round as a pass of several rows does.
    is_plain = softcap is None and sinks is None and not return_scores
    is_plain = is_plain and accumulation_dtype(query.dtype) == query.dtype
    if queries == 1 and is_plain and first == 0 < shortest == longest <= FEW_KEYS:
        return _one_row(query, keys, values, length=longest, scale=scale), None
    if torch.is_grad_enabled():
        # What a backward pass will read may not be written over.
        workspace = None
    probabilities = _probabilities(
        query, keys, lengths=lengths, scale=scale, window=window, softcap=softcap, sinks=sinks,
        workspace=workspace,
    )  # fmt: skip
    packed = probabilities.flatten(2, 3)
    defined = max(shortest, first)
    near = values[:, :, first:defined].to(packed.dtype)
    out = packed[..., : defined - first] @ near
    if defined < longest:
        # Rows end here at different places. What lies past an end is undefined, and 0 * NaN is NaN.
        ends = lengths.view(-1, 1, 1, 1)
        past = torch.arange(defined, longest, device=lengths.device).view(-1, 1) >= ends
        ragged = values[:, :, defined:longest].to(packed.dtype).masked_fill(past, 0.0)
        out = out + packed[..., defined - first :] @ ragged
    out = out.reshape(batch, query_heads, queries, values.shape[3]).to(query.dtype)
    if not return_scores:
        return out, None
    scores = _row_scores(
        probabilities, first=first, size=keys.shape[2], row_limit=row_limit, workspace=workspace
    )
    return out, scores


def _one_row(query: Tensor, keys: Tensor, values: Tensor, *, length: int, scale: float) -> Tensor:
    """Attend from one query row to keys that it sees all of: a plain step over a short context.

    The heads of a group stand for the rows of one product, so that nothing is expanded.
    """
    grouped = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    near_keys, near_values = (cache[:, :, :length] for cache in (keys, values))
    out = scaled_dot_product_attention(grouped, near_keys, near_values, scale=scale)
    return out.reshape(*query.shape[:3], -1)


def attention_scores(
    query: Tensor,
    keys: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    row_limit: int | None,
) -> Tensor:
    """Compute `kernels.attention_scores`."""
    first, _, _ = _key_range(lengths, query.shape[2], window)
    probabilities = _probabilities(
        query, keys, lengths=lengths, scale=scale, window=window, softcap=softcap, sinks=sinks
    )
    return _row_scores(probabilities, first=first, size=keys.shape[2], row_limit=row_limit)


def pooled_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    normaliser: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `kernels.pooled_attention`."""
    options: dict[str, Any] = {"lengths": lengths, "scale": scale, "window": window}
    options |= {"softcap": softcap, "sinks": sinks}
    batch, query_heads, queries, _ = query.shape
    kv_heads, size = keys.shape[1], keys.shape[2]
    out, _ = verify_attention(query, keys, values, return_scores=False, row_limit=None, **options)
    first, _, longest = _key_range(lengths, queries, window)
    logits, visible = _logits(query, keys, lengths=lengths, scale=scale, window=window)
    lse = log_sum_exp(logits, visible=visible, softcap=softcap, sinks=sinks)
    probabilities = attention_probabilities(logits, visible=visible, softcap=softcap, sinks=sinks)
    if normaliser is not None:
        known = normaliser.to(lse.dtype).view(lse.shape)
        # A row that sees nothing has no share, whatever the normaliser says.
        factor = torch.where(lse == float("-inf"), 0.0, torch.exp(lse - known))
        probabilities = probabilities * factor.unsqueeze(-1)
    pooled = probabilities.new_zeros(batch, kv_heads, size)
    pooled[..., first:longest] = probabilities.mean(dim=(2, 3))
    return out, pooled.float(), lse.view(batch, query_heads, queries).float()


def _key_range(lengths: Tensor, queries: int, window: int | None) -> tuple[int, int, int]:
    """Return the first position that any row may see, and the shortest and the longest row."""
    host = lengths.tolist()
    shortest, longest = min(host, default=0), max(host, default=0)
    first = 0 if window is None else min(max(shortest - queries - window + 1, 0), longest)
    return first, shortest, longest


def _probabilities(
    query: Tensor,
    keys: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Return softmax probabilities `[B, Hkv, G, Q, W]`, W positions from `first` to `longest`."""
    logits, visible = _logits(
        query, keys, lengths=lengths, scale=scale, window=window, workspace=workspace
    )
    return attention_probabilities(
        logits, visible=visible, softcap=softcap, sinks=sinks, workspace=workspace
    )


def _logits(
    query: Tensor,
    keys: Tensor,
    *,
    lengths: Tensor,
    scale: float,
    window: int | None,
    workspace: Workspace | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return scaled logits `[B, Hkv, G, Q, W]` and which of their last columns are visible."""
    batch, _, queries, dim = query.shape
    kv_heads = keys.shape[1]
    group = query.shape[1] // kv_heads
    dtype = accumulation_dtype(query.dtype)
    first, shortest, longest = _key_range(lengths, queries, window)
    rows = (query.to(dtype) * scale).reshape(batch, kv_heads, group * queries, dim)
    near = keys[:, :, first:longest].to(dtype)
    out = None
    if workspace is not None:
        out = workspace.shared("logits", (*rows.shape[:3], near.shape[2]), rows)
    logits = torch.matmul(rows, near.transpose(-1, -2), out=out).unflatten(2, (group, queries))
    # Without a window every row sees all that the first query of the shortest row sees: the mask
    # covers the few columns after that.
    masked = first if window is not None else max(shortest - queries + 1, 0)
    visible = None
    if masked < longest:
        own = (
            lengths.view(-1, 1, 1)
            - queries
            + torch.arange(queries, device=lengths.device).view(-1, 1)
        )
        position = torch.arange(masked, longest, device=lengths.device)
        visible = position <= own
        if window is not None:
            visible = visible & (position > own - window)
        visible = visible[:, None, None]
    return logits, visible


def _row_scores(
    probabilities: Tensor,
    *,
    first: int,
    size: int,
    row_limit: int | None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Average over the group's heads and place the columns among all `size` positions."""
    batch, kv_heads, group, queries, width = probabilities.shape
    if row_limit is not None:
        device = probabilities.device
        heads = torch.arange(group, device=device).view(-1, 1, 1)
        packed_index = torch.arange(queries, device=device).view(-1, 1) * group + heads
        probabilities = probabilities.masked_fill(packed_index >= row_limit, 0.0)
    out = None
    if workspace is not None:
        out = workspace.of_layer("scores", (batch, kv_heads, queries, width), probabilities)
    scores = torch.mean(probabilities, dim=2, out=out).float()
    if width == size:
        return scores
    placed = scores.new_zeros(batch, kv_heads, queries, size)
    placed[..., first : first + width] = scores
    return placed
