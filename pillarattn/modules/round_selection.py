"""Selections of many rounds of one text: asked for at once where no history forbids it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from pillarattn.datatypes import RowLengths
from pillarattn.modules.score_buffer import ScoreBuffer, pick_rows
from pillarattn.modules.strategies.base import LayerState, SelectionRequest, Strategy


class RoundRows:
    """Single row scores of many rounds; what `SelectionRequest.score_rows` may be.

    Args:
        scored: `[R, Hkv, Q, S]` a layer.
        end: positions to return.
    """

    def __init__(self, scored: Sequence[Tensor], end: int) -> None:
        self.scored = scored
        self.end = end
        self._stacked: Tensor | None = None

    def __call__(self, which: Tensor) -> Tensor:
        """Return the rows `which` `[layers * R, M]`: `[layers * R, Hkv, M, end]` fp32."""
        return pick_rows(self.scored, which, self.end)

    def of_round(self, place: int, end: int) -> RoundRows:
        """Return those of one round, the same in every layer."""
        if not self.scored[0].is_cuda:
            return RoundRows([scores[place : place + 1] for scores in self.scored], end)
        # One copy of everything, and then one small launch a round instead of one a layer.
        if self._stacked is None:
            self._stacked = torch.stack(list(self.scored))
        return RoundRows([self._stacked[:, place]], end)


class RoundScores(ScoreBuffer):
    """Row scores `[R, Hkv, Q, S]` of the verify passes before R rounds of one text."""

    def rows_of(self, layer_indices: list[int], *, end: int) -> RoundRows:
        """Return a function from row numbers to single rows, of all rounds or of one."""
        return RoundRows([self._layers[index].row_scores for index in layer_indices], end)


def known_tokens(tokens: Tensor, lengths: RowLengths) -> Tensor:
    """Return what each round knows of a text's tokens `[1, T]`, `[R, S + 1]`; -1 is to come."""
    tokens = tokens[:, : lengths.max + 1]
    line = torch.arange(tokens.shape[1], device=tokens.device)
    unknown = line > lengths.tensor.unsqueeze(-1)
    return tokens.expand(len(lengths.host), -1).masked_fill(unknown, -1)


def select_rounds(strategy: Strategy, request: SelectionRequest) -> tuple[Tensor, Tensor]:
    """Return what `strategy.select` says to each of `request.rounds`, in their order.

    A strategy that keeps no history is asked once for all of them.

    Args:
        strategy: chooses.
        request: its batch are rounds of one text; `score_rows`, if any, are `RoundRows`.

    Returns:
        indices `[layers * R, Hkv, N]` int32 and counts `[layers * R, Hkv]` int32, layer-major.
    """
    if not strategy.keeps_history:
        return strategy.select(request)
    layers, rounds = len(request.layers), len(request.rounds)
    # Round by round, so that the numbers of each lie side by side.
    lengths, budgets, recent, starts = (
        t.view(layers, rounds).t().contiguous()
        for t in (request.lengths, request.budgets, request.recent, request.starts)
    )
    counted = None if request.rows is None else request.rows.view(layers, rounds).t().contiguous()
    found = [
        strategy.select(
            _one_round(
                request,
                place,
                lengths[place],
                budgets[place],
                recent[place],
                starts[place],
                None if counted is None else counted[place],
            )
        )
        for place in range(rounds)
    ]
    width = max(indices.shape[-1] for indices, _ in found)
    indices = torch.stack([_widened(indices, width) for indices, _ in found], dim=1)
    counts = torch.stack([counts for _, counts in found], dim=1)
    return indices.flatten(0, 1), counts.flatten(0, 1)


def _one_round(
    request: SelectionRequest,
    place: int,
    lengths: Tensor,
    budgets: Tensor,
    recent: Tensor,
    starts: Tensor,
    rows: Tensor | None,
) -> SelectionRequest:
    """Return what one of the rounds asks; the tensors are the integers of its own rows."""
    layers, length = len(request.layers), request.lengths_on_host()[place]
    scores, tokens, picker = request.scores, request.tokens, request.score_rows
    if scores is not None:
        scores = scores.view(layers, -1, *scores.shape[1:])[:, place, :, :length]
    if tokens is not None:
        tokens = tokens.view(layers, -1, tokens.shape[1])[:, place, : length + 1]
    return replace(
        request,
        lengths=lengths,
        budgets=budgets,
        recent=recent,
        starts=starts,
        rows=rows,
        max_length=length,
        host_lengths=(length,) * layers,
        round_index=request.rounds[place],
        rounds=(),
        scores=scores,
        tokens=tokens,
        score_rows=picker.of_round(place, length) if isinstance(picker, RoundRows) else None,
        layers=tuple(_until(layer, length) for layer in request.layers),
    )


def _until(layer: LayerState, length: int) -> LayerState:
    """Return a layer's keys and values as they were at a length."""
    if layer.keys is None and layer.values is None:
        return layer
    keys, values = (None if t is None else t[:, :, :length] for t in (layer.keys, layer.values))
    return LayerState(layer.index, keys, values)


def _widened(indices: Tensor, width: int) -> Tensor:
    missing = width - indices.shape[-1]
    return pad(indices, (0, missing)) if missing else indices
