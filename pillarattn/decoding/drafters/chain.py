"""A chain of drafters: each level judges the proposals of the one below it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from pillarattn.datatypes import Draft
from pillarattn.decoding.draft_length import ConstantLength
from pillarattn.decoding.drafters.base import Drafter, DraftRequest, TargetBuilder
from pillarattn.decoding.drafters.draft_in_progress import DraftInProgress
from pillarattn.decoding.drafters.model import ModelDrafter, fit_vocabulary
from pillarattn.decoding.target import Target


class ChainDrafter(Drafter):
    """Speculative decoding inside the draft: cheap proposals, judged by a better drafter.

    The last level decodes k tokens speculatively, with the levels before it as its drafter and
    itself as the target. Acceptance takes the residual at every level, so that each of the k tokens
    follows the last level's own law, and that law is the q that the target judges by: the output is
    exactly the target's (TriForce, arXiv 2404.11912, resamples from p instead, which is not).

    Args:
        drafters: the levels, cheapest first; all but the first must be models that read text.
        inner_k: tokens that a lower level proposes per pass of the level above it, >= 1.

    Raises:
        ValueError: the levels cannot be chained; the message says why.
    """

    def __init__(self, drafters: Sequence[Drafter], inner_k: int = 4) -> None:
        levels = list(drafters)
        _check_levels(levels)
        if inner_k < 1:
            raise ValueError(f"inner_k must be an integer >= 1, got {inner_k}")
        *lower, outer = levels
        assert isinstance(outer, ModelDrafter)
        self.levels = levels
        self.inner_k = inner_k
        self.outer = outer
        self.inner: Drafter = lower[0] if len(lower) == 1 else ChainDrafter(lower, inner_k)
        self.name = "+".join(level.name or type(level).__name__ for level in levels)
        self.needs_selections = any(level.needs_selections for level in levels)

    @property
    def scratch(self) -> int:
        """A row that has its k tokens is still given proposals while others have not."""
        return self.inner_k + self.inner.scratch

    def prepare(self, build: TargetBuilder) -> None:
        """Prepare every level."""
        self.inner.prepare(build)
        self.outer.prepare(build)

    def attach(self, target: Target) -> None:
        """Attach every level."""
        self.inner.attach(target)
        self.outer.attach(target)

    def fresh(self) -> Self:
        """Return a chain of fresh levels."""
        new = copy.copy(self)
        new.inner, new.outer = self.inner.fresh(), self.outer.fresh()
        new.levels = [level.fresh() for level in self.levels]
        return new

    def draft(self, request: DraftRequest) -> Draft:
        """Let the last level decode until every row has k tokens, or has ended its draft."""
        history = request.history
        history.reserve(max(history.lengths) + request.k + self.scratch + 1)
        done = DraftInProgress(history, request.k, spare=self.inner_k + 1, idle=request.idle)
        with self.outer.reading(request) as reader:
            while done.running:
                inner = self._proposal(request, done)
                for i in range(inner.k):
                    done.history.sketch(i, inner.tokens[:, i])
                ends = [n + inner.k for n in done.history.lengths]
                raw = fit_vocabulary(
                    reader.read(done.history.ids, ends, count=inner.k + 1), request
                )
                logits = request.process(done.history, done.history.lengths, raw)
                steps = [n - history.prompt_length for n in done.history.lengths]
                verdict = request.rule.judge(inner, logits, steps)
                done.add(
                    inner,
                    verdict,
                    law=request.rule.law(logits),
                    goes_on=request.length.goes_on(logits),
                )
                # The newest token of each row is not read yet, whatever was judged.
                reader.go_back([min(n - 1, e) for n, e in zip(done.ends, ends, strict=True)])
        return done.finish(self.outer.passes_of(reader))

    def _proposal(self, request: DraftRequest, done: DraftInProgress) -> Draft:
        # The pass that judges a proposal adds one more token by itself.
        k = min(self.inner_k, done.missing - 1)
        if k < 1:
            return Draft(request.history.ids.new_empty(request.history.batch, 0))
        return self.inner.draft(
            replace(
                request,
                history=done.history,
                k=k,
                idle=frozenset(range(request.history.batch)) - set(done.running),
                length=ConstantLength(),
            )
        )

    def __repr__(self) -> str:
        return f"ChainDrafter({self.levels!r}, inner_k={self.inner_k})"


def _check_levels(levels: list[Drafter]) -> None:
    if len(levels) < 2:
        raise ValueError(f"a chain needs at least two drafters, got {len(levels)}")
    for above in levels[1:]:
        if not isinstance(above, ModelDrafter):
            raise ValueError(
                f"{above!r} cannot judge the drafts of the level below it: only models that read "
                "text can ('sparse', or an AssistantDrafter); put it first in the chain"
            )
    for level in levels[:-1]:
        if level.needs_selections:
            raise ValueError(
                f"{level!r} runs the target itself, and so must be the last level of a chain"
            )
        if level.reads_target and not (level is levels[-2] and levels[-1].needs_selections):
            raise ValueError(
                f"{level!r} goes on from the target's hidden states, and so must stand directly "
                f"below 'sparse', which runs the target; got {levels!r}"
            )
