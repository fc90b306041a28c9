"""Selections of many texts that know nothing of each other, by one call of the strategy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pillarattn.modules.budgets import RatioBudget
from pillarattn.modules.cache.contiguous import ContiguousCache
from pillarattn.modules.score_buffer import ScoreBuffer
from pillarattn.modules.selector import Selector
from pillarattn.modules.strategies.base import SelectionRequest


class TextSelector(Selector):
    """A selector whose rows are texts: each in a round of its own, with a budget of its own."""

    @classmethod
    def like(cls, selector: Selector) -> TextSelector:
        """Return one that chooses as `selector` does, with its strategy."""
        return cls(
            selector.strategy,
            selector.budget,
            selector.forced,
            normalise=selector.normalise,
            score_dtype=selector.score_dtype,
            all_rows=selector.all_rows,
            kernels=selector.kernels,
        )

    @property
    def is_apart(self) -> bool:
        """Whether a text's keys depend on its own scores alone, and not on what stands beside it.

        Strategies with history keep that of one text, and others look at its keys or tokens. A
        divisor by visible rows would count those of the widest text.
        """
        strategy = self.strategy
        reads = strategy.needs_keys or strategy.needs_values or strategy.needs_tokens
        is_plain = strategy.refresh == "round" and not (strategy.keeps_history or reads)
        return is_plain and self.normalise == "rows"

    def choose_for(
        self,
        cache: ContiguousCache,
        buffer: ScoreBuffer,
        *,
        emitted: list[int],
        rounds: Sequence[int],
        budgets: Sequence[RatioBudget],
    ) -> tuple[Tensor, Tensor]:
        """Choose the keys of every text's coming round.

        Args:
            cache: one row a text, rolled back to the committed tokens.
            buffer: the row scores of the verify passes before.
            emitted: tokens that each text got in it, and so the rows that count.
            rounds: how many rounds were chosen for each text before.
            budgets: of each text, instead of the selector's.

        Returns:
            indices `[layers * B, Hkv, N]` int32 and counts `[layers * B, Hkv]` int32 of
            `sparse_layers(cache)`, layer-major.

        Raises:
            ValueError: the strategy is not `is_apart`, or layers differ in heads or windows.
        """
        request = self._round_request(
            cache, buffer, self._one_group(cache), emitted, [max(1, n) for n in emitted], None,
            rounds=tuple(rounds), budgets=tuple(budgets),
        )  # fmt: skip
        return self.strategy.select(request)

    def choose_ahead(
        self, cache: ContiguousCache, buffer: ScoreBuffer, *, emitted: Tensor,
        rounds: Sequence[int], budget: RatioBudget, widest: int, are_pooled: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Choose as `choose_for` does, while only the device knows lengths and what was emitted.

        Args:
            cache: one row a text, whose lengths are `LiveLengths`; without windows.
            buffer: the row scores of the verify passes before.
            emitted: `[B]` int64.
            rounds: how many rounds were chosen for each text before; for strategies that ask.
            budget: of every text.
            widest: no budget is larger.
            are_pooled: whether scores have one row, pooled over all rows of the passes.

        Raises:
            ValueError: the strategy is not `is_apart`, or layers differ in heads or windows.
        """
        indices = self._one_group(cache)
        lengths, end, count = cache.lengths.tensor, cache.lengths.max, len(indices)
        rows = torch.ones_like(emitted) if are_pooled else emitted.clamp_min(1)
        scores, score_rows = self._left(buffer, indices, rows, end)
        return self.strategy.select(
            SelectionRequest(
                lengths=lengths.repeat(count),
                budgets=budget.of(lengths).repeat(count),
                recent=self.forced.newest_of(emitted).repeat(count),
                sink=self.forced.sink,
                starts=torch.zeros_like(lengths).repeat(count),
                kv_heads=cache.layers[indices[0]].kv_heads,
                max_length=end,
                scores=scores,
                layers=tuple(self._state(cache.layers[i], i) for i in indices),
                rows=rows.repeat(count),
                score_rows=score_rows,
                rounds=tuple(rounds) if self.strategy.needs_rounds else (),
                knows_rounds=self.strategy.needs_rounds,
                widest=min(budget(end), widest),
            )
        )

    def _one_group(self, cache: ContiguousCache) -> list[int]:
        """Return the sparse layers, which can all be chosen together."""
        groups = self._groups(cache)
        if not self.is_apart or len(groups) != 1:
            raise ValueError(
                f"{self.strategy!r} cannot choose for many texts at once, over layers of "
                f"{len(groups)} kinds; use `select` for each"
            )
        return groups[0]
