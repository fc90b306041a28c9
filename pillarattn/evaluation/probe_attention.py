"""Draft attention of many rounds at once: each over its own keys of one shared text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths, Selection
from pillarattn.evaluation.probe_pass import TextPass
from pillarattn.kernels.softmax import accumulation_dtype, attention_probabilities
from pillarattn.modules.cache import ContiguousLayer
from pillarattn.modules.step import AttentionOptions, StepState

# `(layer, query, scores) -> selection` for R * k rows, round-major: see `Selector.choose`.
StepChoice = Callable[[int, Tensor, Tensor | None], Selection]


@dataclass
class KeysRead:
    """Keys that a draft row attended, its own round's included: means over rows and heads."""

    totals: list[Tensor] = field(default_factory=list)
    layers: int = 0

    def mean(self) -> float:
        """Return the mean over layers; waits for the device."""
        return float(torch.stack(self.totals).sum()) / self.layers


class RoundsAttention:
    """Attention of R rounds of k teacher-forced rows each; what `PillarCache.attention` may be.

    Row j of round r sits at position `starts[r] + j`. It reads the round's selected keys, which are
    full attention's, and rows 0..j of its own round, whose keys the sparse pass itself has made.

    Args:
        text: the full pass; its keys are complete up to every start.
        starts: positions where the R rounds begin.
        selections: by layer, one row a round; a layer that is absent reads all it sees.
        choose: chooses a layer's keys from the rows' own queries instead; None does not.
        needs_scores: whether `choose` wants the queries' scores of all keys.
    """

    def __init__(
        self,
        text: TextPass,
        starts: RowLengths,
        selections: dict[int, Selection],
        *,
        choose: StepChoice | None = None,
        needs_scores: bool = False,
    ) -> None:
        self.text = text
        self.starts = starts.tensor
        self.longest = starts.max
        self.selections = selections
        self.choose = choose
        self.needs_scores = needs_scores
        self.read = KeysRead()

    def __call__(
        self,
        query: Tensor,
        layer: ContiguousLayer,
        step: StepState,
        layer_index: int,
        options: AttentionOptions,
        keys_values: Any = None,
    ) -> Tensor:
        """Attend from `query` `[R, Hq, k, D]`; return `[R, Hq, k, Dv]`."""
        step.visited.append(layer_index)
        selection = self.selections.get(layer_index)
        keys, values = layer.views()
        if selection is None:
            selection = self._everything(layer_index, options.window)
        elif self.choose is not None:
            scores = None
            if self.needs_scores:
                scores = self._scores(query, keys, layer_index, options)
            selection = self.choose(layer_index, query, scores)
        rounds, query_heads, rows, _ = query.shape
        if len(selection.counts) == rounds:
            return self._attend(query, keys, values, selection, layer_index, options)
        # Each row has keys of its own: rows become rounds of one row, with a part of the block.
        apart = query.transpose(1, 2).reshape(rounds * rows, query_heads, 1, -1)
        keys, values = (t.repeat_interleave(rows, dim=0) for t in (keys, values))
        out = self._attend(apart, keys, values, selection, layer_index, options)
        return out.view(rounds, rows, query_heads, -1).transpose(1, 2)

    def _attend(
        self,
        query: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        selection: Selection,
        layer_index: int,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend head by head where their selections differ in width, else to all heads at once."""
        heads, group = block_keys.shape[1], query.shape[1] // block_keys.shape[1]
        widths = selection.counts.amax(dim=0).tolist()
        parts = [slice(0, heads)]
        if sum(widths) < 0.8 * heads * max(widths):
            # A budget may move between heads: the narrow ones would be gathered like the widest.
            parts = [slice(head, head + 1) for head in range(heads)]
        found = []
        for part in parts:
            own = Selection(
                selection.indices[:, part, : max(widths[part])],
                selection.counts[:, part],
                selection.tail_start,
            )
            sinks = options.sinks
            if sinks is not None:
                sinks = sinks[part.start * group : part.stop * group]
            out, seen = self._attend_heads(
                query[:, part.start * group : part.stop * group],
                block_keys[:, part],
                block_values[:, part],
                own,
                layer_index,
                part,
                replace(options, sinks=sinks),
            )
            found.append(out)
            self.read.totals.append(seen * ((part.stop - part.start) / heads))
        self.read.layers += 1
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _attend_heads(
        self,
        query: Tensor,
        block_keys: Tensor,
        block_values: Tensor,
        selection: Selection,
        layer_index: int,
        part: slice,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return some heads' output and the mean number of keys that a row sees."""
        batch, query_heads, rows, dim = query.shape
        text = self.text.layer(layer_index)
        assert text.key_buffer is not None
        assert text.value_buffer is not None
        heads, dtype = block_keys.shape[1], accumulation_dtype(query.dtype)
        places = selection.indices.long()
        near_keys, near_values = (
            torch.cat([_gather(buffer[:, part], places), block], dim=2).to(dtype)
            for buffer, block in ((text.key_buffer, block_keys), (text.value_buffer, block_values))
        )
        packed = (query.to(dtype) * _scale(options, dim)).reshape(batch, heads, -1, dim)
        logits = (packed @ near_keys.transpose(-1, -2)).unflatten(2, (-1, rows))
        visible = self._visible(selection, rows, block_keys.shape[2], options.window)
        seen = visible.sum(dim=-1).double().mean()
        probabilities = attention_probabilities(
            logits, visible=visible, softcap=options.softcap, sinks=options.sinks
        )
        out = probabilities.flatten(2, 3) @ near_values
        return out.reshape(batch, query_heads, rows, -1).to(query.dtype), seen

    def _visible(self, selection: Selection, rows: int, block: int, window: int | None) -> Tensor:
        """Return which columns, selected and then the block's, each row sees: `[B, Hkv, 1, Q, N]`.

        With one row a batch entry, the entries run through the rows of each round.
        """
        device = selection.indices.device
        batch, heads, width = selection.indices.shape
        own = torch.arange(block, device=device).repeat(len(self.starts)).view(batch, rows)
        used = torch.arange(width, device=device) < selection.counts.unsqueeze(-1)
        used = used.unsqueeze(2).expand(-1, -1, rows, -1)
        column = torch.arange(block, device=device)
        causal = column <= own.unsqueeze(-1)
        if window is not None:
            causal = causal & (column > own.unsqueeze(-1) - window)
            starts = self.starts.repeat_interleave(batch // len(self.starts)).unsqueeze(-1)
            oldest = (starts + own - window)[:, None, :, None]
            used = used & (selection.indices.unsqueeze(2) > oldest)
        causal = causal.unsqueeze(1).expand(-1, heads, -1, -1)
        return torch.cat([used, causal], dim=-1).unsqueeze(2)

    def _everything(self, layer_index: int, window: int | None) -> Selection:
        """Return what a dense layer reads: all positions before the round, or its window's."""
        heads = self.text.layer(layer_index).views()[0].shape[1]
        counts = self.starts if window is None else self.starts.clamp_max(window - 1)
        most = self.longest if window is None else min(self.longest, window - 1)
        line = torch.arange(most, device=self.starts.device)
        places = ((self.starts - counts).unsqueeze(-1) + line).clamp_max(self.longest - 1)
        return Selection(
            places.unsqueeze(1).expand(-1, heads, -1).to(torch.int32),
            counts.unsqueeze(-1).expand(-1, heads).to(torch.int32),
            self.starts,
        )

    def _scores(
        self, query: Tensor, block_keys: Tensor, layer_index: int, options: AttentionOptions
    ) -> Tensor:
        """Return each row's softmax mass of the text's keys, `[R * k, Hkv, S]` fp32.

        The mass is that of full attention from the sparse pass's queries; keys of the row's own
        round take their share and are not returned.
        """
        rounds, _, rows, dim = query.shape
        keys = self.text.layer(layer_index).views()[0][0, :, : self.longest]
        heads, dtype = keys.shape[0], accumulation_dtype(query.dtype)
        scaled = query.to(dtype) * _scale(options, dim)
        by_head = scaled.unflatten(1, (heads, -1)).transpose(0, 1)  # [Hkv, R, G, k, D]
        far = (by_head.flatten(1, 3) @ keys.to(dtype).transpose(-1, -2)).view(
            heads, rounds, -1, rows, self.longest
        )
        packed = scaled.reshape(rounds, heads, -1, dim)
        near = (packed @ block_keys.to(dtype).transpose(-1, -2)).unflatten(2, (-1, rows))
        logits = torch.cat([far.transpose(0, 1), near], dim=-1)  # [R, Hkv, G, k, S + k]
        line = torch.arange(self.longest, device=query.device)
        column = torch.arange(rows, device=query.device)
        old = (line < self.starts.unsqueeze(-1)).unsqueeze(1).expand(-1, rows, -1)
        new = (column <= column.unsqueeze(-1)).expand(rounds, -1, -1)
        if options.window is not None:
            own = self.starts.unsqueeze(-1) + column
            old = old & (line > (own - options.window).unsqueeze(-1))
            new = new & (column > column.unsqueeze(-1) - options.window)
        visible = torch.cat([old, new], dim=-1)[:, None, None]
        probabilities = attention_probabilities(
            logits, visible=visible, softcap=options.softcap, sinks=options.sinks
        )
        mass = probabilities[..., : self.longest].mean(dim=2).float()
        return mass.transpose(1, 2).flatten(0, 1)


def _scale(options: AttentionOptions, dim: int) -> float:
    return float(dim**-0.5) if options.scale is None else options.scale


def _gather(buffer: Tensor, places: Tensor) -> Tensor:
    """Return `buffer[0, h, places[b, h]]`, `[B, Hkv, N, D]`, from one text's `[1, Hkv, C, D]`."""
    _, heads, capacity, dim = buffer.shape
    first = torch.arange(heads, device=places.device).view(-1, 1) * capacity
    rows = buffer.reshape(heads * capacity, dim).index_select(0, (places + first).view(-1))
    return rows.view(*places.shape, dim)
