"""The softmax that all attention ops share: soft cap, mask and sinks, in the accumulation dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.kernels.workspace import Workspace


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that attention over `dtype` is computed in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention_probabilities(
    logits: Tensor,
    *,
    visible: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Return the softmax probabilities of scaled `logits`, which may be overwritten.

    Shapes: logits `[B, Hkv, G, Q, S]` fp32 or fp64; visible bool, broadcastable to the last
    W <= S columns of logits, the earlier columns being visible to every row; sinks `[Hq]`, a logit
    per query head that takes a share of the softmax and has no value (gpt-oss). A row that sees
    nothing gets zeros. The result may lie in the workspace.
    """
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if visible is not None:
        masked = logits.narrow(-1, logits.shape[-1] - visible.shape[-1], visible.shape[-1])
        # Undefined keys give any logit, NaN too: it is replaced, never added to.
        masked.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        heads = sinks.to(logits.dtype).view(logits.shape[1], logits.shape[2], 1, 1)
        extra = heads.expand(*logits.shape[:-1], 1)
        return torch.softmax(torch.cat([logits, extra], dim=-1), dim=-1)[..., :-1]
    out = None
    if workspace is not None:
        out = workspace.shared("probabilities", tuple(logits.shape), logits)
    probabilities = torch.softmax(logits, dim=-1, out=out)
    if visible is not None and visible.shape[-1] == logits.shape[-1]:
        # Only a mask over all columns can hide a whole row, whose softmax is 0/0.
        probabilities = probabilities.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return probabilities


def log_sum_exp(
    logits: Tensor, *, visible: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the natural log-sum-exps `[B, Hkv, G, Q]` that `attention_probabilities` divides by.

    The arguments are its own; `logits` stay as they are. A row that sees nothing gets -inf.
    """
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None:
        hidden = torch.nn.functional.pad(
            ~visible, (logits.shape[-1] - visible.shape[-1], 0), value=False
        )
        logits = logits.masked_fill(hidden, float("-inf"))
    total = logits.logsumexp(-1)
    if sinks is None:
        return total
    heads = sinks.to(logits.dtype).view(logits.shape[1], logits.shape[2], 1)
    return torch.where(total == float("-inf"), total, torch.logaddexp(total, heads))
