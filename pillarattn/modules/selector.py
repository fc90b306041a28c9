"""The selector: budget, forced tokens and strategy make one selection a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths, Selection, on_device
from pillarattn.kernels import attention_scores
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.cache.contiguous import ContiguousCache, ContiguousLayer
from pillarattn.modules.layer_selections import by_layer, nothing_chosen
from pillarattn.modules.round_selection import RoundScores, known_tokens, select_rounds
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.selection_numbers import ForcedTokens, NumbersOnce
from pillarattn.modules.step import AttentionOptions, SeedQueries
from pillarattn.modules.strategies.base import LayerState, SelectionRequest, Strategy

__all__ = ["ForcedTokens", "Selector"]


class Selector:
    """Chooses each sparse layer's keys after a verify pass, and at draft steps where asked.

    Args:
        strategy: ranks the keys.
        budget: tokens of context to keys kept.
        forced: tokens kept whatever the strategy says.
        normalise: see `kernels.pool_rows`.
        score_dtype: what pooled scores are rounded to (the paper's code: fp16).
        all_rows: pool the rows of rejected drafts too (the paper's code does).
        kernels: "auto", "reference" or "triton".

    Attributes:
        mean_over_ranks: see `SelectionRequest`; set where other processes hold more heads.
        most_keys: keys that any budget keeps, where budgets change; see `SelectionRequest.most`.
    """

    def __init__(
        self,
        strategy: Strategy,
        budget: RatioBudget,
        forced: ForcedTokens,
        *,
        normalise: str = "rows",
        score_dtype: torch.dtype = torch.float32,
        all_rows: bool = False,
        kernels: str = "auto",
    ) -> None:
        self.strategy = strategy
        self.budget = budget
        self.forced = forced
        self.normalise = normalise
        self.score_dtype = score_dtype
        self.all_rows = all_rows
        self.kernels = kernels
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.most_keys = 0
        self.round_index = 0
        self._indices: dict[int, int] = {}
        self._chosen: dict[int, Selection] = {}
        self._numbers = NumbersOnce()

    @property
    def scores_verify(self) -> bool:
        """Whether verify passes, and the prompt's last rows, must leave scores."""
        strategy = self.strategy
        return strategy.refresh == "round" and (strategy.needs_scores or strategy.needs_row_scores)

    def sparse_layers(self, cache: ContiguousCache) -> list[int]:
        """Return the layers to draft with few keys: those without a window, or all if all have one.

        A window already bounds what a draft reads, so in a mixed model it stays as it is.
        """
        used = [
            i
            for i, layer in enumerate(cache.layers)
            if layer.lengths is not None and layer.is_selectable
        ]
        unbounded = [i for i in used if cache.layers[i].window is None]
        return unbounded or used

    def seed(
        self,
        cache: ContiguousCache,
        seeds: dict[int, SeedQueries],
        *,
        tokens: Tensor | None = None,
    ) -> dict[int, Selection]:
        """Choose the keys of the first round from the prompt's last query rows; see `select`."""
        batch = len(cache.lengths.host)
        buffer = ScoreBuffer()
        if not self.scores_verify:
            return self.select(cache, buffer, emitted=[0] * batch, tokens=tokens)
        rows = 0
        for index in self.sparse_layers(cache):
            layer, kept = cache.layers[index], seeds[index]
            assert layer.lengths is not None
            rows = kept.query.shape[2]
            keys = layer.views()[0]
            buffer.put(
                index, self._scores(kept.query, keys, layer.lengths, kept.options), layer.lengths
            )
        return self.select(cache, buffer, emitted=[0] * batch, rows=[rows] * batch, tokens=tokens)

    def select(
        self,
        cache: ContiguousCache,
        buffer: ScoreBuffer,
        *,
        emitted: list[int],
        rows: list[int] | None = None,
        tokens: Tensor | None = None,
    ) -> dict[int, Selection]:
        """Choose the keys of the coming round, after roll back.

        Args:
            cache: rolled back to the committed tokens.
            buffer: the row scores of the verify pass before.
            emitted: tokens that each row emitted in it.
            rows: leading verify rows that count in each row of the batch; None: those emitted.
            tokens: `[B, T]`, for a strategy that needs them; see `SelectionRequest.tokens`.
        """
        selections = self._choose_all(cache, buffer, emitted, rows or emitted, tokens)
        self.round_index += 1
        return selections

    def select_rounds(
        self,
        cache: ContiguousCache,
        buffer: RoundScores,
        *,
        emitted: list[int],
        rows: list[int],
        tokens: Tensor | None = None,
    ) -> dict[int, Selection]:
        """Choose the keys of successive rounds of one text, as `select` would one by one.

        A strategy that keeps no history is asked once.

        Args:
            cache: one text, `[1, Hkv, S, D]`; its lengths are those of the rounds, in their order.
            buffer: the row scores `[rounds, Hkv, Q, S]` of the verify pass before each.
            emitted, rows: see `select`; a number for each round.
            tokens: `[1, T]`, of the text; no round sees those past its newest one.
        """
        count = len(cache.lengths.host)
        rounds = tuple(range(self.round_index, self.round_index + count))
        known = None if tokens is None else known_tokens(tokens, cache.lengths)
        selections = self._choose_all(cache, buffer, emitted, rows, known, rounds=rounds)
        self.round_index += count
        return selections

    def _choose_all(
        self,
        cache: ContiguousCache,
        buffer: ScoreBuffer,
        emitted: list[int],
        rows: list[int],
        tokens: Tensor | None,
        *,
        rounds: tuple[int, ...] = (),
    ) -> dict[int, Selection]:
        selections: dict[int, Selection] = {}
        # Draft steps name a layer by its object.
        self._indices = {id(layer): index for index, layer in enumerate(cache.layers)}
        self._chosen.clear()
        counted = [max(1, n) for n in rows]
        for indices in self._groups(cache):
            if self.strategy.refresh == "step":
                # Chosen at draft steps: this only marks the layers as sparse.
                selections.update(nothing_chosen(indices, cache.lengths))
                continue
            request = self._round_request(
                cache, buffer, indices, emitted, counted, tokens, rounds=rounds
            )
            chosen, counts = (
                select_rounds(self.strategy, request) if rounds else self.strategy.select(request)
            )
            selections.update(by_layer(indices, chosen, counts, cache.lengths))
        return selections

    def refresh(
        self, base: RowLengths, emitted: list[int], layer: ContiguousLayer, query: Tensor,
        keys: Tensor, lengths: RowLengths, options: AttentionOptions,
    ) -> Selection:  # fmt: skip
        """Choose one layer's keys at a draft step, among the first `base`.

        Args:
            base: committed tokens, where the round began.
            emitted: tokens that each row emitted in the round before.
            layer: the cache layer.
            query: `[B, Hq, 1, D]`, the draft's own.
            keys: the layer's keys, drafts included.
            lengths: tokens in each row, drafts included.
            options: what the layer asks of its attention.
        """
        index = self._indices.get(id(layer), 0)
        # Every row drafts one token a step, so that the first row tells the step.
        step = lengths.host[0] - base.host[0] - 1 if lengths.host else 0
        steps = self.strategy.refresh_steps
        if steps is not None and step not in steps and index in self._chosen:
            return self._chosen[index]
        scores = None
        if self.strategy.needs_scores:
            scores = self._scores(query, keys, lengths, options)[:, :, 0, : base.max]
        state = LayerState(index, keys, layer.views()[1])
        self._chosen[index] = self.choose(
            base,
            emitted,
            state,
            window=layer.window,
            query=query[:, :, 0],
            scores=scores,
            step=step,
        )
        return self._chosen[index]

    def choose(
        self,
        base: RowLengths,
        emitted: list[int],
        layer: LayerState,
        *,
        window: int | None,
        query: Tensor,
        scores: Tensor | None,
        step: int,
    ) -> Selection:
        """Ask the strategy for one layer's keys at a draft step.

        Args:
            base: committed tokens of each row.
            emitted: tokens that each row emitted in the round before.
            layer: keys and values; of one text for all rows, or of each row.
            window: positions that a query of the layer sees, or None.
            query: `[B, Hq, D]`.
            scores: `[B, Hkv, S]` if the strategy needs scores.
            step: draft step, 0 for the round's first.
        """
        assert layer.keys is not None
        request = self._request(
            base,
            emitted,
            (layer,),
            window=window,
            kv_heads=layer.keys.shape[1],
            scores=None if scores is None else scores.to(self.score_dtype),
            query=query if self.strategy.needs_queries else None,
            step=step,
        )
        indices, counts = self.strategy.select(request)
        return Selection(indices, counts, base.tensor)

    def _groups(self, cache: ContiguousCache) -> list[list[int]]:
        """Return the sparse layers, grouped by what they must share to be chosen together."""
        groups: dict[tuple[int, int | None], list[int]] = {}
        for index in self.sparse_layers(cache):
            layer = cache.layers[index]
            assert layer.key_buffer is not None
            groups.setdefault((layer.kv_heads, layer.window), []).append(index)
        return list(groups.values())

    def _round_request(
        self,
        cache: ContiguousCache,
        buffer: ScoreBuffer,
        indices: list[int],
        emitted: list[int],
        counted: list[int],
        tokens: Tensor | None,
        *,
        rounds: tuple[int, ...],
        budgets: tuple[RatioBudget, ...] = (),
    ) -> SelectionRequest:
        layer, end = cache.layers[indices[0]], cache.lengths.max
        assert layer.key_buffer is not None
        scores = score_rows = rows = None
        if self.scores_verify:
            rows = on_device(counted, layer.key_buffer.device)
            scores, score_rows = self._left(buffer, indices, rows, end)
            rows = rows.repeat(len(indices))
        return self._request(
            cache.lengths,
            emitted,
            tuple(self._state(cache.layers[i], i) for i in indices),
            window=layer.window,
            kv_heads=layer.kv_heads,
            scores=scores,
            rows=rows,
            score_rows=score_rows,
            tokens=None if tokens is None else tokens[:, : end + 1].repeat(len(indices), 1),
            rounds=rounds,
            budgets=budgets,
        )

    def _left(
        self, buffer: ScoreBuffer, indices: list[int], rows: Tensor, end: int
    ) -> tuple[Tensor | None, Callable[[Tensor], Tensor] | None]:
        """Return what a verify pass has left that the strategy asks for: scores, and single rows.

        Args:
            buffer: the row scores.
            indices: layers.
            rows: `[B]` int64, leading verify rows that count.
            end: tokens of the longest row.
        """
        scores = score_rows = None
        if self.strategy.needs_scores:
            pooled = buffer.pool(indices, rows=rows, end=end, normalise=self.normalise)
            scores = pooled.to(self.score_dtype)
        if self.strategy.needs_row_scores:
            score_rows = buffer.rows_of(indices, end=end)
        return scores, score_rows

    def _state(self, layer: ContiguousLayer, index: int) -> LayerState:
        strategy = self.strategy
        if not (strategy.needs_keys or strategy.needs_values):
            return LayerState(index)
        keys, values = layer.views()
        return LayerState(
            index,
            keys if strategy.needs_keys else None,
            values if strategy.needs_values else None,
        )

    def _request(
        self,
        lengths: RowLengths,
        emitted: list[int],
        layers: tuple[LayerState, ...],
        *,
        window: int | None,
        kv_heads: int,
        scores: Tensor | None = None,
        rows: Tensor | None = None,
        score_rows: Callable[[Tensor], Tensor] | None = None,
        query: Tensor | None = None,
        step: int | None = None,
        tokens: Tensor | None = None,
        rounds: tuple[int, ...] = (),
        budgets: tuple[RatioBudget, ...] = (),
    ) -> SelectionRequest:
        newest = [self.forced.newest(n) for n in emitted]
        numbers = self._numbers.of(lengths, newest, budgets or self.budget, window)
        table = numbers.table.repeat(1, len(layers))
        return SelectionRequest(
            lengths=table[0],
            budgets=table[1],
            recent=table[2],
            sink=self.forced.sink,
            starts=table[3],
            kv_heads=kv_heads,
            max_length=lengths.max,
            scores=scores,
            round_index=self.round_index,
            layers=layers,
            rows=rows,
            score_rows=score_rows,
            query=query,
            step=step,
            tokens=tokens,
            rounds=rounds,
            host_lengths=lengths.host * len(layers),
            widest=numbers.widest,
            most=self.most_keys,
            mean_over_ranks=self.mean_over_ranks,
        )

    def _scores(
        self, query: Tensor, keys: Tensor, lengths: RowLengths, options: AttentionOptions
    ) -> Tensor:
        return attention_scores(
            query,
            keys,
            lengths=lengths.tensor,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            implementation=self.kernels,
        )
