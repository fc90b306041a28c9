"""What a strategy is asked: rows, budgets, forced tokens, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pillarattn.kernels import pooled_select, topk_select


@dataclass(frozen=True)
class LayerState:
    """One layer of a request.

    Attributes:
        index: the layer's number in the model: what history is kept under.
        keys: `[B, Hkv, S, D]`, a view of the cache (post position embedding); what lies at or past
            a row's length is undefined. B is 1 where all rows read one text. None if the strategy
            has `needs_keys = False`.
        values: `[B, Hkv, S, Dv]`, likewise, for `needs_values`.
    """

    index: int
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class SelectionRequest:
    """What a strategy is asked: R rows (batch, or layers times batch, layer-major) at once.

    Attributes:
        lengths: `[R]` int64, tokens in the cache; positions 0..length-1 may be chosen.
        budgets: `[R]` int64, keys to keep per KV head, the forced ones counted.
        recent: `[R]` int64, newest tokens to keep whatever the scores say.
        sink: first tokens to keep whatever the scores say.
        starts: `[R]` int64, first position that a window leaves visible.
        kv_heads: Hkv.
        max_length: S, the longest row.
        scores: `[R, Hkv, S]`, mean softmax mass of each key in the last verify pass (in the draft
            query's own row for `refresh = "step"`); None if `needs_scores` is False.
        round_index: rounds since the prompt, 0 for the first selection.
        layers: the layers that the rows belong to, in their order; R is their number times B.
        rows: `[R]` int64, verify rows that count: `scores` is their mean. None at a draft step.
        score_rows: see `row_scores`; None if `needs_row_scores` is False.
        query: `[R, Hq, D]`, the draft step's own query, for `needs_queries`.
        step: draft step that asks, 0 for the round's first; None between rounds.
        tokens: `[R, S + 1]` int64, the token at each position, -1 where it is unknown; at a row's
            length lies its newest token, which has no key yet. For `needs_tokens`.
        rounds: where the rows of the batch are rounds of one text, the number of each since the
            prompt; empty: all rows are at `round_index`.
        knows_rounds: False where rows are in rounds of their own that nobody has counted, because
            the strategy does not say `needs_rounds`.
        host_lengths: `lengths` on the host, where the caller knows them.
        widest: the most keys that any of the budgets lets a row keep, where the caller knows it:
            `keep_best` need not wait for the device.
        most: keys that other requests of this generation may keep: see `kernels.topk_select`.
        mean_over_ranks: averages a tensor over the processes that share the layer's heads; None:
            all heads are here.
    """

    lengths: Tensor
    budgets: Tensor
    recent: Tensor
    sink: int
    starts: Tensor
    kv_heads: int
    max_length: int
    scores: Tensor | None
    round_index: int = 0
    layers: tuple[LayerState, ...] = (LayerState(0),)
    rows: Tensor | None = None
    score_rows: Callable[[Tensor], Tensor] | None = None
    query: Tensor | None = None
    step: int | None = None
    tokens: Tensor | None = None
    rounds: tuple[int, ...] = ()
    knows_rounds: bool = True
    host_lengths: tuple[int, ...] = field(default=(), repr=False)
    widest: int | None = field(default=None, repr=False)
    most: int = field(default=0, repr=False)
    mean_over_ranks: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)

    @property
    def layer_indices(self) -> tuple[int, ...]:
        """The numbers of the request's layers: the key of anything remembered between rounds."""
        return tuple(layer.index for layer in self.layers)

    def lengths_on_host(self) -> tuple[int, ...]:
        """Return `lengths` as integers; free of a device transfer where the caller gave them."""
        return self.host_lengths or tuple(self.lengths.tolist())

    def round_numbers(self) -> Tensor:
        """Return each row's rounds since the prompt, `[R]` int64; 0 for a first selection.

        Raises:
            ValueError: nobody counted: the strategy does not say `needs_rounds = True`.
        """
        if not self.knows_rounds:
            raise ValueError("rounds were not counted; set needs_rounds = True in the strategy")
        if not self.rounds:
            return torch.full_like(self.lengths, self.round_index)
        return torch.tensor(self.rounds, device=self.lengths.device).repeat(len(self.layers))

    def of_texts(self, texts: int) -> SelectionRequest:
        """Return a request of one row a text and layer, which ends where its longest row does.

        Args:
            texts: rows of the batch that are different texts: all of them, or 1.
        """
        layers = len(self.layers)
        if texts * layers == len(self.lengths):
            return self
        return replace(
            self,
            lengths=self.lengths.view(layers, -1).amax(dim=1),
            host_lengths=(self.max_length,) * layers,
        )

    def grouped_query(self) -> Tensor:
        """Return the draft step's query by KV head, `[R, Hkv, G, D]` fp32.

        Raises:
            ValueError: there is none: the strategy lacks `needs_queries` or `refresh = "step"`.
        """
        if self.query is None:
            raise ValueError(
                "no query was given; set needs_queries = True and refresh = 'step' in the strategy"
            )
        rows, _, dim = self.query.shape
        return self.query.float().view(rows, self.kv_heads, -1, dim)

    def row_scores(self, which: Tensor) -> Tensor:
        """Return single verify rows, `[R, Hkv, M, S]` fp32, for row numbers `which` `[R, M]`.

        Row 0 is the round's first query; rows past `rows` belong to rejected drafts.

        Raises:
            ValueError: the strategy does not say `needs_row_scores = True`.
        """
        if self.score_rows is None:
            raise ValueError("row scores were not kept; set needs_row_scores = True")
        return self.score_rows(which)

    def mean_over_heads(self, values: Tensor) -> Tensor:
        """Return the mean of `values` `[R, Hkv, ...]` over all KV heads of a layer, `[R, ...]`.

        Heads that other ranks of a tensor-parallel model hold count too.
        """
        mean = values.mean(dim=1)
        return mean if self.mean_over_ranks is None else self.mean_over_ranks(mean)

    def keep_best(
        self,
        scores: Tensor,
        *,
        sink: int | None = None,
        recent: Tensor | None = None,
        budgets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the selection that ranks keys by `scores` `[R, Hkv, S]`, forced ones included.

        Args:
            scores: larger is better; ties go to the lowest position, NaN ranks last.
            sink: instead of the request's.
            recent: `[R]`, instead of the request's.
            budgets: `[R]` or, where a budget moves between heads, `[R, Hkv]`.
        """
        rows, heads, size = scores.shape
        lengths, starts = self.lengths, self.starts
        widest = self.widest if budgets is None else None
        budgets = self.budgets if budgets is None else budgets
        recent = self.recent if recent is None else recent
        apart = budgets.ndim == 2
        if apart:
            # Heads with budgets of their own are rows of one head each.
            scores, budgets = scores.reshape(rows * heads, 1, size), budgets.reshape(-1)
            lengths, starts, recent = (
                t.repeat_interleave(heads) for t in (lengths, starts, recent)
            )
        indices, counts = topk_select(
            scores,
            lengths=lengths,
            budgets=budgets,
            recent=recent,
            sink=self.sink if sink is None else sink,
            starts=starts,
            capacity=widest,
            most=self.most,
        )
        if apart:
            return indices.reshape(rows, heads, -1), counts.reshape(rows, heads)
        return indices, counts

    def keep_best_pooled(self, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Return the selection that spends a row's budget on all its layers and heads together.

        Every head keeps its forced positions; the rest of the even budgets goes to the largest
        masses, wherever they are. Only masses that mean the same everywhere can be compared like
        that: a forecast in units of attention does, a rank does not.

        Args:
            mass: `[R, Hkv, S]`; ties go to the lowest layer, head, position, NaN ranks last.
        """
        return pooled_select(
            mass,
            layers=len(self.layers),
            lengths=self.lengths,
            budgets=self.budgets,
            recent=self.recent,
            sink=self.sink,
            starts=self.starts,
        )

    def positions(self) -> Tensor:
        """Return every position as a score, `[R, Hkv, S]` fp32: later is better."""
        line = torch.arange(self.max_length, dtype=torch.float32, device=self.lengths.device)
        return line.expand(self.lengths.shape[0], self.kv_heads, -1)

    def visible(self) -> Tensor:
        """Return which positions may be chosen, `[R, S]` bool."""
        line = torch.arange(self.max_length, device=self.lengths.device)
        return (line < self.lengths.unsqueeze(-1)) & (line >= self.starts.unsqueeze(-1))

    def contested(self) -> Tensor:
        """Return which positions are left to the ranking, `[R, S]` bool: visible, not forced."""
        room = (self.lengths - self.starts).clamp_min(0)
        kept = torch.minimum(self.budgets, room)
        newest = torch.minimum(self.recent, kept)
        oldest = (kept - newest).clamp_max(self.sink)
        line = torch.arange(self.max_length, device=self.lengths.device)
        return (line < (self.lengths - newest).unsqueeze(-1)) & (
            line >= (self.starts + oldest).unsqueeze(-1)
        )

    def committed(self, values: Tensor) -> Tensor:
        """Return `values` `[R, Hkv, S]` with 0 at and past each row's length, where they are noise.

        A row that is shorter than the longest one may hold what rejected drafts left there.
        """
        past = self._past
        if values.shape[-1] != past.shape[-1]:
            past = self._past_of(values.shape[-1])
        return values.masked_fill(past, 0.0)

    @cached_property
    def _past(self) -> Tensor:
        """Which positions lie at or past each row's length, `[R, 1, S]`; asked for many times."""
        return self._past_of(self.max_length)

    def _past_of(self, size: int) -> Tensor:
        line = torch.arange(size, device=self.lengths.device)
        return (line >= self.lengths.unsqueeze(-1)).unsqueeze(1)
