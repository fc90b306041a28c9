"""Ragged attention inputs with NaN where nothing is defined, and their truth in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAN = float("nan")


def ragged_cache(
    lengths: list[int],
    *,
    size: int,
    kv_heads: int,
    group: int,
    queries: int,
    dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    spread: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return query, keys, values and lengths; keys are views of a larger buffer full of NaN.

    `spread` is the standard deviation of the queries: large ones make peaked rows.
    """
    gen = torch.Generator(device).manual_seed(seed)
    batch = len(lengths)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device).to(dtype)

    case = {"query": noise(batch, queries, kv_heads * group, dim).transpose(1, 2) * spread}
    for name, width in (("keys", dim), ("values", value_dim)):
        buffer = noise(batch, kv_heads, size + 3, width)
        for b, length in enumerate(lengths):
            buffer[b, :, length:] = NAN
        case[name] = buffer[:, :, :size]
    case["lengths"] = torch.tensor(lengths, device=device)
    return case


def logits_of(case: dict[str, Any], dtype: torch.dtype, visible: Tensor, **options: Any) -> Tensor:
    """Return logits `[B, Hkv, G, Q, S]` in `dtype`, -inf where `visible` (broadcast) is False."""
    query, keys = case["query"].to(dtype), case["keys"].to(dtype).nan_to_num()
    grouped = query.unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys.unsqueeze(2).transpose(-1, -2)) * (
        options.get("scale") or query.shape[-1] ** -0.5
    )
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    return logits.masked_fill(~visible, float("-inf"))


def attend(
    case: dict[str, Any], dtype: torch.dtype, visible: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, probabilities `[B, Hkv, G, Q, S]` and log-sum-exps in `dtype`."""
    logits = logits_of(case, dtype, visible, **options)
    unseen = (logits == float("-inf")).all(-1)
    ends = logits
    if options.get("sinks") is not None:
        sinks = options["sinks"].to(dtype).view(*logits.shape[1:3], 1, 1)
        ends = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
    lse = ends.logsumexp(-1).masked_fill(unseen, float("-inf"))
    probs = torch.softmax(ends, -1)[..., : logits.shape[-1]]
    probs = probs.masked_fill(unseen.unsqueeze(-1), 0.0)
    out = probs @ case["values"].to(dtype).nan_to_num().unsqueeze(2)
    return out.flatten(1, 2), probs, lse.flatten(1, 2)


def causal(case: dict[str, Any], window: int | None = None) -> Tensor:
    """Return what the newest Q rows see, `[B, 1, 1, Q, S]`."""
    queries, size = case["query"].shape[2], case["keys"].shape[2]
    device = case["lengths"].device
    own = case["lengths"].view(-1, 1, 1) - queries + torch.arange(queries, device=device)[:, None]
    position = torch.arange(size, device=device)
    visible = position <= own
    if window is not None:
        visible = visible & (position > own - window)
    return visible[:, None, None]


def assert_near(got: Tensor, truth: Tensor, rival: Tensor, dtype: torch.dtype) -> None:
    """The error may be twice that of the rival in the inputs' own dtype, plus one rounding."""
    assert got.shape == truth.shape
    bound = 2 * (rival.double() - truth).abs().max() + 4 * torch.finfo(dtype).eps
    error = (got.double() - truth).abs().max()
    assert error <= bound, f"error {error:.3g}, allowed {bound:.3g}"
