"""KV append in plain PyTorch: a slice copy, or an indexed one where rows are ragged."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_append(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, *, positions: int | Tensor
) -> None:
    """Compute `kernels.kv_append`."""
    queries = new_keys.shape[2]
    if isinstance(positions, Tensor):
        batch = torch.arange(keys.shape[0], device=keys.device).unsqueeze(-1)
        places = positions.long().unsqueeze(-1) + torch.arange(queries, device=keys.device)
        # A slice between two index tensors puts the heads behind them: [B, Q, Hkv, D].
        keys[batch, :, places] = new_keys.transpose(1, 2)
        values[batch, :, places] = new_values.transpose(1, 2)
        return
    keys[:, :, positions : positions + queries].copy_(new_keys)
    values[:, :, positions : positions + queries].copy_(new_values)
