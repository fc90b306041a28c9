"""Scores that one round leaves behind: what each verify row attended to, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths
from pillarattn.kernels import pool_layers


@dataclass(frozen=True)
class ScoredLayer:
    """Row scores `[B, Hkv, Q, S]` fp32 of one layer and the row lengths they were taken at."""

    row_scores: Tensor
    lengths: RowLengths


class ScoreBuffer:
    """Collects the row scores of every sparse layer during a verify pass and pools them afterwards.

    Which rows count is known only after acceptance, so rows are kept apart until `pool`.
    """

    def __init__(self) -> None:
        self._layers: dict[int, ScoredLayer] = {}

    def put(self, layer_index: int, row_scores: Tensor, lengths: RowLengths) -> None:
        """Store the row scores of a layer, replacing what it had."""
        self._layers[layer_index] = ScoredLayer(row_scores, lengths)

    def __contains__(self, layer_index: int) -> bool:
        return layer_index in self._layers

    def take(self, layer_index: int) -> Tensor:
        """Return a layer's row scores `[B, Hkv, Q, S]` and forget them."""
        return self._layers.pop(layer_index).row_scores

    def pool(
        self,
        layer_indices: list[int],
        *,
        rows: Tensor,
        end: int,
        normalise: str = "rows",
    ) -> Tensor:
        """Return `[len(layer_indices) * B, Hkv, end]` fp32: scores averaged over the leading rows.

        Args:
            layer_indices: layers with the same number of KV heads.
            rows: `[B]` int64, leading verify rows that count.
            end: positions to return; later ones (rolled back) are left out.
            normalise: see `kernels.pool_rows`.
        """
        scored = [self._layers[index] for index in layer_indices]
        if normalise == "rows" and not rows.is_cuda:
            return _pooled_in_place(scored, rows.tolist(), end)
        return pool_layers(
            [layer.row_scores for layer in scored],
            lengths=[layer.lengths.tensor for layer in scored],
            rows=rows,
            end=end,
            normalise=normalise,
        )

    def rows_of(self, layer_indices: list[int], *, end: int) -> Callable[[Tensor], Tensor]:
        """Return a function from row numbers to single rows, which copies only what is asked for.

        Its argument is `[len(layer_indices) * B, M]` int64, layer-major; its result
        `[len(layer_indices) * B, Hkv, M, end]` fp32.
        """
        scored = [self._layers[index].row_scores for index in layer_indices]

        return lambda which: pick_rows(scored, which, end)


def pick_rows(scored: Sequence[Tensor], which: Tensor, end: int) -> Tensor:
    """Return single rows of layers' row scores `[B, Hkv, Q, S]`, in one copy a layer.

    Args:
        scored: one a layer.
        which: `[layers * B, M]` int64, row numbers, layer-major.
        end: positions to return.

    Returns:
        `[layers * B, Hkv, M, end]` fp32.
    """
    picked = [
        scores[torch.arange(len(scores), device=scores.device)[:, None], :, part, :end]
        for scores, part in zip(scored, torch.split(which, list(map(len, scored))), strict=True)
    ]
    return torch.cat(picked).transpose(1, 2).float().contiguous()


def _pooled_in_place(scored: list[ScoredLayer], counted: list[int], end: int) -> Tensor:
    """Return what `ScoreBuffer.pool` does; on a CPU, where every copy counts, nothing is stacked.

    Rows are summed where they lie, and those of rejected drafts are not looked at.
    """
    batch = len(counted)
    _, heads, queries, _ = scored[0].row_scores.shape
    if any(not 1 <= count <= queries for count in counted):
        raise ValueError(f"rows must be in 1..{queries}, got {counted}")
    # Default dtype and device are the caller's, who may have set them to those of a model.
    device = scored[0].row_scores.device
    pooled = torch.empty(len(scored), batch, heads, end, dtype=torch.float32, device=device)
    for layer, into in zip(scored, pooled, strict=True):
        for row, (count, length) in enumerate(zip(counted, layer.lengths.host, strict=True)):
            lines = layer.row_scores[row, :, :count, :end].float()
            torch.sum(lines, dim=1, out=into[row]).div_(count)
            into[row, :, length:] = 0.0
    return pooled.flatten(0, 1)
