"""One forward pass over the rows of many requests: prompts, drafts and verify passes side by side.

Rows are packed into one sequence. All that a model does token by token runs on them at once; in
attention each request reads its own part of the pool: all of them by one call where a `MixedStep`
says how, else one after the other by the kernels of their phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pillarattn.datatypes import Phase, RowLengths, Selection, on_device
from pillarattn.engine.block_table import BlockTable
from pillarattn.engine.mixed_step import MixedStep
from pillarattn.engine.paged_cache import PagedLayer, RequestView, check_layer
from pillarattn.engine.request_scores import RequestScores
from pillarattn.kernels import draft_attention, verify_attention
from pillarattn.modules.attention import keep_queries
from pillarattn.modules.selector import Selector
from pillarattn.modules.step import AttentionOptions, StepState

# Stands for a token that an earlier pass draws: only the device knows it yet.
PENDING = -1


@dataclass(slots=True)
class Segment:
    """The rows of one request in a pass.

    Attributes:
        request_id: whose they are.
        phase: what they are for.
        tokens: token ids, one a row; the last one may be `PENDING`.
        start: position of the first one in the request.
        view: the request's part of the pool.
        placed: where its tokens lie, in logical order, as many as there are blocks for, or what
            returns that, for passes that need it.
        selections: keys that a draft reads, by layer; an absent layer reads all it sees.
        tail_start: tokens when they were chosen, if the host knows.
        selector: chooses keys from the draft's own query, where the strategy does so.
        emitted: tokens of the round before, which such a choice keeps.
        scores: where a verify pass puts its row scores, or None.
        exact: whether these must be by the rows' own normalisers, and not by those of drafts.
        scored_layers: layers that are scored.
        seeds: where a prompt's last query rows go.
        seed_rows: how many those are; 0 keeps none.
        keep: rows at the end whose logits are wanted.
        holes: whether slots of some tokens are -1: they are on the host, and a draft does without.
        table: the blocks that the slots are in; None: they stand for themselves.
    """

    request_id: str
    phase: Phase
    tokens: list[int]
    start: int
    view: RequestView
    placed: Tensor | Callable[[], Tensor]
    selections: Mapping[int, Selection] = field(default_factory=dict)
    tail_start: int | None = None
    selector: Selector | None = None
    emitted: int = 0
    scores: RequestScores | None = None
    exact: bool = False
    scored_layers: frozenset[int] = frozenset()
    seeds: StepState | None = None
    keep: int = 0
    holes: bool = False
    table: BlockTable | None = None

    @property
    def length(self) -> int:
        """Tokens of the request after the pass."""
        return self.start + len(self.tokens)

    @property
    def slots(self) -> Tensor:
        """Where its tokens lie, on the device."""
        placed = self.placed if isinstance(self.placed, Tensor) else self.placed()
        return placed[: self.length]

    @property
    def tail(self) -> int:
        """Where a draft's tail begins; what the host knows of it spares a wait."""
        if self.tail_start is not None:
            return self.tail_start
        start, lengths = next(iter(self.selections.values())).tail_start, self.view.lengths
        return lengths.max if start is lengths.tensor else int(start)

    def finds_tail(self, layers: int) -> bool:
        """Return whether a draft of `layers` layers reads only chosen keys that may be away."""
        if not self.holes:
            return True
        if self.table is None or len(self.selections) < layers:
            return False
        return None not in self.table.device[self.tail // self.view.cache.block_size :]


class PackedStep:
    """What attention must know of a pass; travels with the cache.

    Args:
        segments: in the order of their rows.
        device: where the pool is.
    """

    # Not a prefill: attention never goes to the model's own function.
    phase = Phase.VERIFY

    def __init__(self, segments: list[Segment], device: torch.device) -> None:
        self.visited: list[int] = []
        self.device = device
        self.rows = sum(len(s.tokens) for s in segments)
        self.slots = torch.cat([s.slots[s.start :] for s in segments])
        self.drafts: list[Segment] = []
        self.blocks: list[tuple[int, Segment]] = []
        at, draft_rows = 0, []
        for segment in segments:
            if segment.phase is Phase.DRAFT:
                self.drafts.append(segment)
                draft_rows.append(at)
            else:
                self.blocks.append((at, segment))
            at += len(segment.tokens)
        self.draft_rows = on_device(draft_rows, device)
        self.draft_lengths = on_device([s.length for s in self.drafts], device)
        self._lengths: dict[int, Tensor] = {}

    def length(self, tokens: int) -> Tensor:
        """Return a number of tokens, `[1]` on the device; layers that ask for the same share it."""
        if tokens not in self._lengths:
            self._lengths[tokens] = on_device([tokens], self.device)
        return self._lengths[tokens]


class PackedAttention:
    """Attention of a packed pass, called by the model's layers through the attention twin.

    Args:
        model_name: for messages.
        kernels: "auto", "reference" or "triton".
    """

    def __init__(self, model_name: str, *, kernels: str = "auto") -> None:
        self.model_name, self.kernels = model_name, kernels

    def __call__(
        self,
        query: Tensor,
        layer: PagedLayer,
        step: PackedStep | MixedStep,
        layer_index: int,
        options: AttentionOptions,
        keys_values: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend from `query` `[1, Hq, T, D]`; return `[1, Hq, T, Dv]`.

        The pass's own keys and values (`keys_values`) are in the pool already.
        """
        check_layer(layer, self.model_name)
        step.visited.append(layer_index)
        layer.window = options.window
        dtype, query = query.dtype, _as_pool(query, layer)
        if isinstance(step, MixedStep):
            return step.attend(query, layer, layer_index, options, self.kernels).to(dtype)
        assert layer.value_buffer is not None
        heads, width = query.shape[1], layer.value_buffer.shape[2]
        out = query.new_empty(1, heads, step.rows, width)
        if step.drafts:
            drafted = self._drafts(query[0, :, step.draft_rows], layer, step, layer_index, options)
            out[0, :, step.draft_rows] = drafted
        for at, segment in step.blocks:
            place = slice(at, at + len(segment.tokens))
            out[:, :, place] = self._block(
                query[:, :, place], layer, step, segment, layer_index, options
            )
        return out.to(dtype)

    def _block(
        self,
        query: Tensor,
        layer: PagedLayer,
        step: PackedStep,
        segment: Segment,
        index: int,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend from a block of rows to all of its request's keys."""
        scored = segment.scores is not None and index in segment.scored_layers
        first = 0
        if options.window is not None and not scored:
            first = max(0, segment.length - len(segment.tokens) - options.window + 1)
        keys, values = layer.read(segment.slots[first : segment.length])
        if segment.seeds is not None:
            keep_queries(query, segment.seeds, index, options)
        length = segment.length - first
        out, rows = verify_attention(
            query,
            keys,
            values,
            lengths=step.length(length),
            return_scores=scored,
            implementation=self.kernels,
            **_arguments(options),
        )
        if rows is not None and segment.scores is not None:
            segment.scores.put(index, rows, RowLengths([length], query.device))
        return out

    def _drafts(
        self,
        query: Tensor,
        layer: PagedLayer,
        step: PackedStep,
        index: int,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend from one row of each drafting request, `[Hq, B, D]`, to the keys it reads."""
        batch = len(step.drafts)
        rows = query.transpose(0, 1).unsqueeze(2)
        chosen = [
            _positions(segment, layer, index, rows[i : i + 1], options)
            for i, segment in enumerate(step.drafts)
        ]
        width = max(slots.shape[1] for slots, _ in chosen)
        indices = torch.zeros(batch, layer.kv_heads, width, dtype=torch.int32, device=query.device)
        counts = torch.zeros(batch, layer.kv_heads, dtype=torch.int32, device=query.device)
        for i, (slots, count) in enumerate(chosen):
            indices[i, :, : slots.shape[1]] = slots
            counts[i] = count
        keys, values = layer.pool_views(batch)
        # The pool is every row's cache, and slots stand for positions: the tail is among them, and
        # what a window hides has been left out.
        out = draft_attention(
            rows,
            keys,
            values,
            indices=indices,
            counts=counts,
            tail_start=step.draft_lengths,
            lengths=step.draft_lengths,
            implementation=self.kernels,
            **{**_arguments(options), "window": None},
        )
        return out[:, :, 0].transpose(0, 1)


def _as_pool(query: Tensor, layer: PagedLayer) -> Tensor:
    """Return queries in the pool's dtype, which may be wider than what autocast computes with.

    Raises:
        ValueError: the pool's dtype cannot hold them.
    """
    assert layer.key_buffer is not None
    dtype = layer.key_buffer.dtype
    if query.dtype == dtype:
        return query
    if torch.promote_types(query.dtype, dtype) != dtype:
        raise ValueError(
            f"the engine's pool holds {dtype} and the model computes with {query.dtype}: an engine "
            "that was made under torch.autocast must run under it too"
        )
    return query.to(dtype)


def _arguments(options: AttentionOptions) -> dict[str, Any]:
    return {
        "scale": options.scale, "window": options.window, "softcap": options.softcap,
        "sinks": options.sinks,
    }  # fmt: skip


def _positions(
    segment: Segment, layer: PagedLayer, index: int, query: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor | int]:
    """Return the slots that a draft reads, `[Hkv, M]` in order of position, and how many count."""
    end, heads = segment.length, layer.kv_heads
    first = 0 if options.window is None else max(0, end - options.window)
    selection = segment.selections.get(index)
    if selection is None:
        seen = segment.slots[first:end]
        if segment.holes:
            seen = seen[seen >= 0]
        return seen.expand(heads, -1), len(seen)
    if segment.selector is not None:
        keys, _ = layer.read(segment.slots[:end])
        selection = segment.selector.refresh(
            segment.view.lengths, [segment.emitted], segment.view.layers[index],  # type: ignore[arg-type]
            query, keys, RowLengths([end], query.device), options,
        )  # fmt: skip
        assert isinstance(segment.selections, dict)
        segment.selections[index] = selection
    start = segment.tail_start
    start = int(selection.tail_start) if start is None else start
    tail = torch.arange(start, end, device=query.device).expand(heads, -1)
    positions = torch.cat([selection.indices[0].long(), tail], dim=1)
    line = torch.arange(selection.indices.shape[2], device=query.device)
    used = torch.cat(
        [line < selection.counts[0].unsqueeze(-1), torch.ones_like(tail, dtype=torch.bool)], dim=1
    )
    used = used & (positions >= first)
    if segment.holes:
        used = used & (segment.slots[positions] >= 0)
    if not bool(used.all()):
        order = torch.argsort((~used).to(torch.int8), dim=1, stable=True)
        positions = positions.gather(1, order).where(used.gather(1, order), 0)
    return segment.slots[positions].clamp_min(0), used.sum(dim=1)
