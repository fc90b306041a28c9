"""The selector: budget, forced tokens and strategy make one selection a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths, Selection
from pillarattn.kernels import attention_scores
from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.cache.contiguous import ContiguousCache, ContiguousLayer
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.step import AttentionOptions, SeedQueries
from pillarattn.modules.strategies.base import SelectionRequest, Strategy


@dataclass(frozen=True)
class ForcedTokens:
    """Tokens that every selection keeps: the first `sink` and the newest `recent`.

    The tokens that the last round emitted are always kept, and `extra` more (the paper's code
    keeps one more: reference.md 1.2).
    """

    recent: int = 16
    sink: int = 4
    extra: int = 0

    def newest(self, emitted: int) -> int:
        """Return how many newest tokens to keep after a round that emitted `emitted` tokens."""
        return max(self.recent, emitted + self.extra)


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
        self.round_index = 0

    def sparse_layers(self, cache: ContiguousCache) -> list[int]:
        """Return the layers to draft with few keys: those without a window, or all if all have one.

        A window already bounds what a draft reads, so in a mixed model it stays as it is.
        """
        used = [i for i, layer in enumerate(cache.layers) if layer.lengths is not None]
        unbounded = [i for i in used if cache.layers[i].window is None]
        return unbounded or used

    def seed(self, cache: ContiguousCache, seeds: dict[int, SeedQueries]) -> dict[int, Selection]:
        """Choose the keys of the first round from the prompt's last query rows."""
        sparse = self.sparse_layers(cache)
        batch = len(cache.lengths.host)
        if not (self.strategy.needs_scores and self.strategy.refresh == "round"):
            return self.select(cache, ScoreBuffer(), emitted=[0] * batch)
        buffer = ScoreBuffer()
        rows = 0
        for index in sparse:
            layer, kept = cache.layers[index], seeds[index]
            assert layer.lengths is not None
            rows = kept.query.shape[2]
            scores = attention_scores(
                kept.query,
                layer.views()[0],
                lengths=layer.lengths.tensor,
                scale=kept.options.scale,
                window=kept.options.window,
                softcap=kept.options.softcap,
                sinks=kept.options.sinks,
                implementation=self.kernels,
            )
            buffer.put(index, scores, layer.lengths)
        return self.select(cache, buffer, emitted=[0] * batch, rows=[rows] * batch)

    def select(
        self,
        cache: ContiguousCache,
        buffer: ScoreBuffer,
        *,
        emitted: list[int],
        rows: list[int] | None = None,
    ) -> dict[int, Selection]:
        """Choose the keys of the coming round, after roll back.

        Args:
            cache: rolled back to the committed tokens.
            buffer: the row scores of the verify pass before.
            emitted: tokens that each row emitted in it.
            rows: leading verify rows that count in each row of the batch; None: those emitted.
        """
        selections: dict[int, Selection] = {}
        for indices in self._groups(cache):
            layer = cache.layers[indices[0]]
            assert layer.key_buffer is not None
            scores = None
            if self.strategy.needs_scores and self.strategy.refresh == "round":
                counted = [max(1, n) for n in (rows or emitted)]
                scores = buffer.pool(
                    indices,
                    rows=torch.tensor(counted, device=layer.key_buffer.device),
                    end=cache.lengths.max,
                    normalise=self.normalise,
                ).to(self.score_dtype)
            elif self.strategy.needs_scores:
                # Chosen at each draft step: this only marks the layers as sparse.
                selections.update(self._placeholder(cache, indices))
                continue
            request = self._request(cache.lengths, layer, emitted, scores, copies=len(indices))
            chosen, counts = self.strategy.select(request)
            selections.update(self._split(indices, chosen, counts, cache.lengths))
        self.round_index += 1
        return selections

    def refresh(
        self, base: RowLengths, emitted: list[int], layer: ContiguousLayer, query: Tensor,
        keys: Tensor, lengths: RowLengths, options: AttentionOptions,
    ) -> Selection:  # fmt: skip
        """Choose one layer's keys from a draft query `[B, Hq, 1, D]`, among the first `base`."""
        scores = attention_scores(
            query,
            keys,
            lengths=lengths.tensor,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            implementation=self.kernels,
        )[:, :, 0, : base.max]
        request = self._request(base, layer, emitted, scores.to(self.score_dtype), copies=1)
        indices, counts = self.strategy.select(request)
        return Selection(indices, counts, base.tensor)

    def _groups(self, cache: ContiguousCache) -> list[list[int]]:
        """Return the sparse layers, grouped by what they must share to be chosen together."""
        groups: dict[tuple[int, int | None], list[int]] = {}
        for index in self.sparse_layers(cache):
            layer = cache.layers[index]
            assert layer.key_buffer is not None
            groups.setdefault((layer.key_buffer.shape[1], layer.window), []).append(index)
        return list(groups.values())

    def _request(
        self,
        lengths: RowLengths,
        layer: ContiguousLayer,
        emitted: list[int],
        scores: Tensor | None,
        *,
        copies: int,
    ) -> SelectionRequest:
        assert layer.key_buffer is not None
        window = layer.window
        starts = [0 if window is None else max(0, n - window + 1) for n in lengths.host]
        visible = [n - start for n, start in zip(lengths.host, starts, strict=True)]
        # One transfer to the device for all of them.
        table = torch.tensor(
            [
                list(lengths.host),
                [self.budget(n) for n in visible],
                [self.forced.newest(n) for n in emitted],
                starts,
            ],
            device=layer.key_buffer.device,
        ).repeat(1, copies)
        return SelectionRequest(
            lengths=table[0],
            budgets=table[1],
            recent=table[2],
            sink=self.forced.sink,
            starts=table[3],
            kv_heads=layer.key_buffer.shape[1],
            max_length=lengths.max,
            scores=scores,
            round_index=self.round_index,
        )

    def _placeholder(self, cache: ContiguousCache, indices: list[int]) -> dict[int, Selection]:
        tail_start = cache.lengths.tensor
        empty = torch.zeros(len(tail_start), 1, 0, dtype=torch.int32, device=tail_start.device)
        return {i: Selection(empty, empty.sum(-1, dtype=torch.int32), tail_start) for i in indices}

    @staticmethod
    def _split(
        indices: list[int], chosen: Tensor, counts: Tensor, lengths: RowLengths
    ) -> dict[int, Selection]:
        batch = len(lengths.host)
        return {
            index: Selection(keys, count, lengths.tensor)
            for index, keys, count in zip(
                indices, torch.split(chosen, batch), torch.split(counts, batch), strict=True
            )
        }
